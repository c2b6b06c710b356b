// Devices of type PrivateUse1 whose memory is host memory: allocators, generators, streams and torch's hooks.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace pretend {

constexpr auto KEY = c10::DispatchKey::PrivateUse1;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int64_t DEFAULT_MEMORY = int64_t(1) << 34; // bytes of each device

// Called for each copy between devices ("to_device", "to_host", "between_devices"), and for each wait for a device
// ("synchronize"). Copies that return before they are complete do not wait.
using Recorder = void (*)(const char* kind, const char* name, int64_t bytes);
inline std::atomic<Recorder> recorder{nullptr};

inline void record(const char* kind, const std::string& name, int64_t bytes = 0) {
  if (auto function = recorder.load()) function(kind, name.c_str(), bytes);
}

// ---- memory

struct DeviceState {
  c10::CachingDeviceAllocator::DeviceStats stats;
  int64_t total = DEFAULT_MEMORY;
};

inline std::mutex lock;

inline std::vector<DeviceState>& devices() {
  static std::vector<DeviceState> all(2);
  return all;
}

inline DeviceState& state_of(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < int64_t(devices().size()), "pretend:", int(index), " does not exist");
  return devices()[index];
}

// A device is lost as soon as a file with its number is in the folder $PRETEND_LOST: each use raises an error.
inline void check_alive(c10::DeviceIndex index) {
  static const char* folder = std::getenv("PRETEND_LOST");
  if (folder && index >= 0)
    TORCH_CHECK(
        access((std::string(folder) + "/" + std::to_string(index)).c_str(), F_OK) != 0, "pretend error: device ",
        int(index), " is lost");
}

struct Block { // memory of a device: an allocation of the host, which it owns
  c10::DeviceIndex index;
  int64_t bytes;
  c10::Storage owner;
};

inline void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> guard(lock);
    auto& stats = devices()[block->index].stats;
    stats.allocated_bytes[0].decrease(block->bytes);
    stats.reserved_bytes[0].decrease(block->bytes);
    stats.allocation[0].decrease(1);
  }
  delete block;
}

inline void charge(c10::DeviceIndex index, int64_t bytes) {
  std::lock_guard<std::mutex> guard(lock);
  auto& state = state_of(index);
  auto used = state.stats.allocated_bytes[0].current;
  if (used + bytes > state.total) {
    state.stats.num_ooms++;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "pretend out of memory. Tried to allocate ", bytes, " bytes. Device ", int(index),
        " has a total capacity of ", state.total, " bytes of which ", state.total - used, " bytes are free.");
  }
  state.stats.allocated_bytes[0].increase(bytes);
  state.stats.reserved_bytes[0].increase(bytes);
  state.stats.allocation[0].increase(1);
}

// Turns memory of the host into memory of a device.
inline c10::DataPtr adopt(c10::Storage owner, c10::DeviceIndex index) {
  const auto bytes = int64_t(owner.nbytes());
  charge(index, bytes);
  auto* data = owner.mutable_data();
  return {data, new Block{index, bytes, std::move(owner)}, &release, c10::Device(TYPE, index)};
}

inline c10::Storage host_storage(size_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, c10::GetAllocator(c10::DeviceType::CPU), true);
}

inline c10::DeviceIndex& current() {
  thread_local c10::DeviceIndex index = 0;
  return index;
}

inline c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current();
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return adopt(host_storage(bytes), current()); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {} // nothing is cached
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(lock);
    return state_of(index).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(lock);
    state_of(index).stats.allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(lock);
    for (auto* stat : {&state_of(index).stats.allocated_bytes, &state_of(index).stats.reserved_bytes})
      (*stat)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(lock);
    auto& state = state_of(index);
    return {size_t(std::max<int64_t>(0, state.total - state.stats.allocated_bytes[0].current)), size_t(state.total)};
  }
};

inline std::map<const char*, size_t> pinned; // start and size of pinned host memory

inline bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(lock);
  auto next = pinned.upper_bound(static_cast<const char*>(data));
  return next != pinned.begin() && (--next, static_cast<const char*>(data) < next->first + next->second);
}

struct PinnedMemory final : at::HostAllocator {
  static void unpin(void* data) {
    {
      std::lock_guard<std::mutex> guard(lock);
      pinned.erase(static_cast<char*>(data));
    }
    std::free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto* data = static_cast<char*>(std::aligned_alloc(64, (bytes / 64 + 1) * 64));
    std::lock_guard<std::mutex> guard(lock);
    pinned[data] = bytes;
    return {data, data, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

// ---- random numbers: those of the CPU, from a state of the device's own

struct Generator final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator();
  explicit Generator(c10::DeviceIndex index) : GeneratorImpl({TYPE, index}, c10::DispatchKeySet(KEY)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
};

inline const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (size_t i = 0; i < devices().size(); ++i) made.push_back(at::make_generator<Generator>(c10::DeviceIndex(i)));
    return made;
  }();
  state_of(index < 0 ? current() : index);
  return all[index < 0 ? current() : index];
}

// ---- streams and current device: work is complete when it returns

void complete_copies(); // defined in operators.cpp

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, current()}; }
  void setDevice(c10::Device device) const override {
    state_of(device.index());
    current() = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current() = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {TYPE, index_of(device)});
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(devices().size()); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<char*>(event); }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new char;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return wait(nullptr); }
  bool queryStream(const c10::Stream&) const override { return wait(nullptr); }
  void synchronizeEvent(void*) const override { wait("event"); }
  void synchronizeStream(const c10::Stream&) const override { wait("stream"); }
  void synchronizeDevice(c10::DeviceIndex) const override { wait("device"); }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0; }

 private:
  static bool wait(const char* what) {
    complete_copies();
    if (what) pretend::record("synchronize", what);
    return true;
  }
};

inline DeviceMemory device_memory;
inline PinnedMemory pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(devices().size()); }
  c10::DeviceIndex getCurrentDevice() const override { return current(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchangeDevice(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    state_of(index);
    return std::exchange(current(), index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    state_of(index < 0 ? current() : index);
    return at::make_generator<Generator>(index < 0 ? current() : index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto grown = host_storage(bytes);
    std::memcpy(grown.mutable_data(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(adopt(std::move(grown), storage.device().index()));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

} // namespace pretend
