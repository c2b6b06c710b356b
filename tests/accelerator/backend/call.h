// Tensors of a device as tensors of the CPU with the same memory, and the way back.
#pragma once

#include "device.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <unordered_map>

namespace pretend {

inline bool ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

inline at::Tensor with_layout_of(const at::Tensor& like, at::Tensor made) {
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

inline at::Tensor tensor_on(c10::DispatchKey key, c10::Storage storage, const at::Tensor& like) {
  auto keys = c10::DispatchKeySet(key);
  return with_layout_of(like, at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype()));
}

inline at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  return with_layout_of(
      like,
      at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype()));
}

// One call of an operator: its tensors as tensors of the CPU with the same memory, and the way back.
struct Call {
  c10::DeviceIndex index = -1;
  std::unordered_map<c10::StorageImpl*, c10::Storage> host_of; // by the device's
  std::unordered_map<c10::StorageImpl*, at::Tensor> device_of; // a tensor of the device, by the host's
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs; // on the CPU, on the device

  at::Tensor to_host(const at::Tensor& tensor) {
    for (auto& [host, device] : pairs)
      if (device.is_same(tensor)) return host;
    auto& storage = host_of[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      auto data = c10::DataPtr(const_cast<void*>(tensor.storage().data()), c10::Device(c10::kCPU));
      auto* allocator = c10::GetAllocator(c10::kCPU);
      storage = c10::Storage(
          c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), allocator, true);
      device_of[storage.unsafeGetStorageImpl()] = tensor;
    }
    auto host = tensor_on(c10::DispatchKey::CPU, storage, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
    pairs.emplace_back(host, tensor);
    return host;
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (auto& [host, device] : pairs)
      if (host.is_same(tensor)) return device;
    auto& known = device_of[tensor.storage().unsafeGetStorageImpl()];
    if (known.defined()) return view_of(known, tensor);
    const auto bytes = tensor.storage().nbytes();
    auto memory = adopt(tensor.storage(), index);
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), &device_memory, true);
    return known = tensor_on(KEY, std::move(storage), tensor);
  }

  // Operators with `out` and `resize_` change the size of tensors, and so perhaps their memory.
  void write_back() {
    for (auto& [host, device] : pairs) {
      auto *from = host.storage().unsafeGetStorageImpl(), *to = device.storage().unsafeGetStorageImpl();
      if (from->data() != to->data()) {
        auto owner = host_storage(0);
        const auto bytes = from->nbytes();
        owner.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(from->mutable_data_ptr()));
        owner.unsafeGetStorageImpl()->set_nbytes(bytes);
        to->set_data_ptr_noswap(adopt(owner, index));
        to->set_nbytes(bytes);
      }
      if (host.sizes() != device.sizes() || host.strides() != device.strides() ||
          host.storage_offset() != device.storage_offset())
        device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }
};

template <typename Function>
void for_each_tensor(const c10::IValue& value, Function function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef())
      if (item.isTensor()) function(item.toTensor());
  }
}

template <typename Function>
c10::IValue map_tensors(const c10::IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& item : value.toTensorVector()) list.push_back(function(item));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& item : value.toOptionalTensorVector())
      list.push_back(item.has_value() ? std::optional<at::Tensor>(function(*item)) : std::nullopt);
    return list;
  }
  return value;
}

} // namespace pretend
