// Operators of the devices: each runs the CPU's kernel on the same memory, after the checks that a GPU makes.
#include "call.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <torch/library.h>

#include <list>
#include <set>

namespace pretend {
namespace {

using torch::jit::Stack;

// The host needs the result, or its size, before it continues.
const std::set<std::string> WAITING = {
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave",
    "aten::multinomial", "aten::allclose"};

// Operators besides the element-wise ones that take a number in the memory of the host.
const std::set<std::string> TAKES_NUMBERS = {
    "aten::fill_", "aten::masked_fill_", "aten::masked_fill", "aten::where", "aten::_foreach_mul_", "aten::_foreach_mul",
    "aten::_foreach_add_", "aten::_foreach_div_", "aten::_local_scalar_dense", "aten::_fused_sgd_", "aten::clamp_",
    "aten::lerp_", "aten::index_fill_"};

c10::DeviceIndex find_device(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  c10::DeviceIndex found = -1;
  for (const auto& value : arguments)
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (found < 0 && ours(tensor)) found = tensor.device().index();
    });
  for (size_t i = 0; found < 0 && i < arguments.size(); ++i)
    if (arguments[i].isDevice()) found = index_of(arguments[i].toDevice());
  TORCH_CHECK(found >= 0, "no argument of ", schema.name(), " has a device");
  return found;
}

void check_tensor(
    const c10::OperatorHandle& op, const at::Tensor& tensor, bool is_index, bool is_output, c10::DeviceIndex index) {
  if (!tensor.defined() || tensor.device() == c10::Device(TYPE, index)) return;
  const auto& name = op.schema().name();
  if (tensor.device().is_cpu()) {
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return;
    if (tensor.dim() == 0 && !is_output && (op.hasTag(at::Tag::pointwise) || TAKES_NUMBERS.count(name))) return;
    if (is_index) { // torch copies it
      record("to_device", name, int64_t(tensor.nbytes()));
      record("synchronize", name);
      return;
    }
  }
  TORCH_CHECK(
      false, "Expected all tensors to be on the same device, but found at least two devices, ", c10::Device(TYPE, index),
      " and ", tensor.device(), "! (when checking arguments of ", name, ")");
}

bool waits(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  if (name == "aten::repeat_interleave") return !arguments.back().isInt(); // the output's size is not given
  if (name != "aten::index" && name != "aten::_index_put_impl_") return WAITING.count(name) > 0;
  bool masks = false; // are replaced by the indices of their nonzero values
  for_each_tensor(arguments[1], [&](const at::Tensor& index) { masks |= index.defined() && index.dtype() == at::kBool; });
  return masks && (name == "aten::index" || arguments[2].toTensor().numel() != 1);
}

// The generator of the call, as a generator of the CPU.
c10::IValue host_generator(const c10::IValue& value, c10::DeviceIndex index) {
  const auto given = value.isNone() ? default_generator(index) : value.toGenerator();
  TORCH_CHECK(
      given.device().type() == TYPE, "Expected a '", TYPE, "' device type for generator but found '",
      given.device().type(), "'");
  return given.get<Generator>()->inner;
}

std::atomic<int64_t> calls{0}; // of operators

void run_on_host(const c10::OperatorHandle& op, const c10::OperatorHandle& kernel, Stack* stack) {
  const auto& schema = op.schema();
  const auto& declared = schema.arguments();
  const auto arguments = torch::jit::last(stack, kernel.schema().arguments().size());
  const bool same = &op.schema() == &kernel.schema();
  ++calls;
  Call call;
  call.index = find_device(schema, arguments);
  check_alive(call.index);
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  if (waits(schema.name(), arguments)) {
    complete_copies();
    record("synchronize", schema.name());
  }
  const auto start = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[start + i];
    if (same && declared[i].type()->str().find("Generator") != std::string::npos) {
      value = host_generator(value, call.index);
      draws = false;
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else {
      const auto& argument = declared[std::min(i, declared.size() - 1)];
      const bool is_index = value.isList() && argument.name() == "indices";
      const bool is_output = same && argument.alias_info() && argument.alias_info()->isWrite();
      for_each_tensor(value, [&](const at::Tensor& tensor) { check_tensor(op, tensor, is_index, is_output, call.index); });
      value = map_tensors(value, [&](const at::Tensor& tensor) { return ours(tensor) ? call.to_host(tensor) : tensor; });
    }
  }
  auto& global = *at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl();
  auto& own = *default_generator(call.index).get<Generator>()->inner.unsafeGetGeneratorImpl();
  c10::intrusive_ptr<c10::TensorImpl> before;
  if (draws) { // without a generator as argument
    before = global.get_state();
    global.set_state(*own.get_state());
  }
  kernel.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (draws) {
    own.set_state(*global.get_state());
    global.set_state(*before);
  }
  call.write_back();
  for (auto& value : torch::jit::last(stack, schema.returns().size()))
    const_cast<c10::IValue&>(value) =
        map_tensors(value, [&](const at::Tensor& tensor) { return call.to_device(tensor); });
}

void fallback(const c10::OperatorHandle& op, Stack* stack) { run_on_host(op, op, stack); }

void convolution(const c10::OperatorHandle& op, Stack* stack) {
  static const auto kernel = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_on_host(op, kernel, stack);
}

void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  static const auto kernel = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto& gradient = (*stack)[stack->size() - 10].toTensor();
  const bool with_bias = stack->back().toBoolList()[2];
  c10::IValue sizes;
  if (with_bias) sizes = std::vector<int64_t>{gradient.size(1)};
  stack->insert(stack->end() - 7, sizes); // `bias_sizes`, which only this kernel has
  run_on_host(op, kernel, stack);
}

// ---- copies

struct Pending { // a copy that the host has not waited for
  at::Tensor on_host, value;
  bool to_host;
};
std::list<Pending> pending_copies;
std::mutex pending_lock;

at::Tensor host_alias(Call& call, const at::Tensor& tensor) { return ours(tensor) ? call.to_host(tensor) : tensor; }

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Call call;
  const auto from = host_alias(call, source), to = host_alias(call, target);
  check_alive(source.device().index());
  check_alive(target.device().index());
  const bool crosses = source.device() != target.device() && source.numel();
  const bool both = ours(source) && ours(target);
  const bool at_once = non_blocking && (both || is_pinned((ours(source) ? target : source).const_data_ptr()));
  const bool waits = crosses && !at_once;
  if (crosses) {
    const char* kind = !ours(source) ? "to_device" : !ours(target) ? "to_host" : "between_devices";
    record(kind, "aten::copy_", int64_t(source.numel() * target.element_size()));
  }
  if (waits) {
    complete_copies();
    record("synchronize", "aten::copy_");
  }
  if (crosses && !waits && !both) {
    const bool to_host = !ours(target);
    std::lock_guard<std::mutex> guard(pending_lock);
    if (to_host || from.is_contiguous())
      pending_copies.push_back({to_host ? to : from, to_host ? from.to(to.scalar_type(), false, true) : from.clone(), to_host});
    if (to_host) { // the value arrives when the host has waited
      if (to.is_contiguous()) std::memset(to.mutable_data_ptr(), 0xff, to.nbytes());
      return target;
    }
  }
  to.copy_(from);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(source), offset, size, stride);
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) { return at::cpu::set_(self, std::move(source)); }
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::cpu::set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// ---- for tests

int64_t number_of_calls() { return calls; }
void set_memory(int64_t index, int64_t bytes) {
  std::lock_guard<std::mutex> guard(lock);
  state_of(c10::DeviceIndex(index)).total = bytes;
}
void seed(int64_t index, int64_t value) {
  auto generator = default_generator(c10::DeviceIndex(index));
  generator.set_current_seed(uint64_t(value));
}
at::Tensor rng_state(int64_t index) { return default_generator(c10::DeviceIndex(index)).get_state(); }
void set_rng_state(int64_t index, const at::Tensor& state) {
  auto generator = default_generator(c10::DeviceIndex(index));
  generator.set_state(state);
}

} // namespace

void complete_copies() {
  std::lock_guard<std::mutex> guard(pending_lock);
  at::AutoDispatchBelowADInplaceOrView below;
  const auto copies = std::exchange(pending_copies, {});
  for (const auto& [on_host, value, to_host] : copies) {
    if (to_host)
      on_host.copy_(value);
    else
      TORCH_CHECK(
          std::memcmp(on_host.const_data_ptr(), value.const_data_ptr(), value.nbytes()) == 0,
          "pinned memory was changed before its copy to the device was complete");
  }
}

} // namespace pretend

extern "C" void pretend_record_with(pretend::Recorder function) { pretend::recorder = function; }
extern "C" void pretend_register(int64_t count) { // before the first use of a device
  static pretend::Hooks hooks;
  pretend::devices().resize(count);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(pretend::TYPE, &pretend::device_memory);
  at::setHostAllocator(pretend::TYPE, &pretend::pinned_memory);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, pretend::Guard)
namespace at::native { // attention uses the CPU's kernel, too
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &_fused_sdp_choice_cpp)
} // namespace at::native

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&pretend::fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &pretend::copy_from);
  m.impl("_copy_from_and_resize", &pretend::copy_from_and_resize);
  m.impl("set_.source_Storage_storage_offset", &pretend::set_storage);
  m.impl("set_.source_Storage", &pretend::set_whole_storage);
  m.impl("set_.source_Tensor", &pretend::set_tensor);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&pretend::convolution>());
  m.impl(
      "convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&pretend::convolution_backward>());
  // What the CPU has a kernel for is not composed of other operators.
  const std::set<std::string> own = {"set_.source_Storage_storage_offset", "set_.source_Storage", "set_.source_Tensor"};
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (op.name.rfind("aten::", 0) != 0) continue;
    const auto name = op.name.substr(6) + (op.overload_name.empty() ? "" : "." + op.overload_name);
    const auto handle = c10::Dispatcher::singleton().findOp(op);
    if (!own.count(name) && handle->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&pretend::fallback>());
  }
}

namespace at { // whose names the macros use
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { // as on CUDA
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
  PROMOTE(stack)
  PROMOTE(cat)
}
} // namespace at

TORCH_LIBRARY(pretend, m) {
  m.def("calls() -> int", &pretend::number_of_calls);
  m.def("set_memory(int index, int bytes) -> ()", &pretend::set_memory);
  m.def("seed(int index, int value) -> ()", &pretend::seed);
  m.def("rng_state(int index) -> Tensor", &pretend::rng_state);
  m.def("set_rng_state(int index, Tensor state) -> ()", &pretend::set_rng_state);
}
