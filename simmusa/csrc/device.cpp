// The PrivateUse1 device: its guard (devices, streams, events), its allocator and its hooks.
#include "refusals.h"
#include "timeline.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace simmusa {

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto kMusa = c10::DeviceType::PrivateUse1;
constexpr c10::StreamId kChannels = 1 << 20;  // stream ids from here on are communicators'

std::atomic<int> device_total{1};
std::atomic<bool> used{false}, forked{false};
std::atomic<c10::StreamId> next_stream{1}, next_channel{kChannels};
std::mutex channels_mutex;
auto& free_channels = *new std::map<int, std::vector<StreamKey>>;  // never destroyed: groups may outlive main
thread_local int current = 0;
thread_local c10::StreamId streams[kMaxDevices] = {};
thread_local std::optional<Stamp> record_as;

void mark_used() {
  require_own_process();
  if (!used.exchange(true)) pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

// -- memory -----------------------------------------------------------------------------------------------------

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->piece) give_piece(block->piece);
  if (!block->owner && block->data) std::free(block->data);
  delete block;
}

uint64_t stream_of(int device) { return key_of(current_stream(device)); }

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    mark_used();
    auto* block = new Block;
    block->device = current;
    block->bytes = static_cast<int64_t>(bytes);
    if (bytes) {
      try {
        require_sound(current);
        block->piece = take_piece(current, stream_of(current), block->bytes);
        TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&block->data, 64, bytes) == 0, "MUSA out of memory: the host has no room for a simulated allocation of ", bytes, " bytes");
      } catch (...) {
        if (block->piece) give_piece(block->piece);
        delete block;
        throw;
      }
    }
    return {block->data, block, &release, Device(kMusa, static_cast<DeviceIndex>(current))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { give_back_segments(current); }
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto now = memory_of(device);
    auto fill = [&](auto& kinds) {
      kinds[0].current = now.current;
      kinds[0].peak = now.peak;
      kinds[0].allocated = now.allocated;
      kinds[0].freed = now.freed;
    };
    fill(stats.allocated_bytes);
    fill(stats.active_bytes);
    stats.reserved_bytes[0].current = now.reserved;
    stats.reserved_bytes[0].peak = now.reserved_peak;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { reset_peak(device); }
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kMusa, &device_allocator);

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes) {
      TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&data, 64, bytes) == 0, "no host memory to pin: ", bytes, " bytes");
      std::lock_guard<std::mutex> guard(pinned_mutex);
      pinned[static_cast<const char*>(data)] = bytes;
    }
    return {data, data, &unpin, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void unpin(void* data) {
    if (!data) return;
    {
      std::lock_guard<std::mutex> guard(pinned_mutex);
      pinned.erase(static_cast<const char*>(data));
    }
    std::free(data);
  }
};

PinnedAllocator pinned_allocator;

// -- guard: devices, streams, events ----------------------------------------------------------------------------

Device musa(int index) { return Device(kMusa, static_cast<DeviceIndex>(index)); }
int resolve(Device device) { return device.has_index() ? device.index() : current; }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kMusa; }
  Device getDevice() const override { return musa(current); }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_total.load()); }

  Stream getStream(Device device) const override { return current_stream(resolve(device)); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, musa(resolve(device))); }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::UNSAFE, musa(resolve(device)), next_stream++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    auto before = current_stream(stream.device_index());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override { return Timeline::get().query(Timeline::get().record(key_of(stream))); }
  void synchronizeStream(const Stream& stream) const override { Timeline::get().synchronize_stream(key_of(stream)); }
  // No synchronizeDevice: torch_musa has none, so torch.accelerator.synchronize fails here as it does there.

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Stamp;
    *static_cast<Stamp*>(*event) = record_as ? *record_as : Timeline::get().record(key_of(stream));
    record_as.reset();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Stamp*>(event); }
  void block(void* event, const Stream& stream) const override {
    if (event) Timeline::get().wait(key_of(stream), *static_cast<Stamp*>(event));
  }
  bool queryEvent(void* event) const override { return !event || Timeline::get().query(*static_cast<Stamp*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) Timeline::get().synchronize(*static_cast<Stamp*>(event));
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    return static_cast<double>(static_cast<Stamp*>(end)->time_ns - static_cast<Stamp*>(start)->time_ns) / 1e6;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- hooks ------------------------------------------------------------------------------------------------------

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return used; }
  void init() const override { mark_used(); }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_total.load()); }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  // The bytes are the host's, so the CPU's generators serve: kernels are the CPU's and ask for one.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

Hooks hooks;

}  // namespace

void set_device_count(int count) {
  TORCH_CHECK(count >= 1 && count <= kMaxDevices, "simmusa: ", count, " devices; choose 1 to ", kMaxDevices);
  device_total = count;
  static bool registered = [] {
    at::RegisterPrivateUse1HooksInterface(&hooks);
    return true;
  }();
  (void)registered;
}

int device_count() { return device_total; }
int current_device() { return current; }

void set_current_device(int index) {
  TORCH_CHECK(index >= 0 && index < device_total, "MUSA error: invalid device ordinal ", index, " of ", device_total.load());
  mark_used();
  enter(index);
  current = index;
}

Stream current_stream(int device) { return Stream(Stream::UNSAFE, musa(device), streams[device]); }

void set_current_stream(int device, int64_t id) { streams[device] = id; }

StreamKey new_channel(int device) {
  std::lock_guard<std::mutex> guard(channels_mutex);
  auto& free = free_channels[device];
  if (!free.empty()) {
    auto again = free.back();
    free.pop_back();
    return again;
  }
  return (static_cast<StreamKey>(device) << 32) | static_cast<StreamKey>(next_channel++);
}

void give_back_channel(StreamKey channel) {
  std::lock_guard<std::mutex> guard(channels_mutex);
  free_channels[device_of(channel)].push_back(channel);
}

void require_own_process() {
  TORCH_CHECK(
      !forked,
      "Cannot re-initialize MUSA in forked subprocess. To use MUSA with multiprocessing, you must use the 'spawn' start method");
}

c10::Allocator* allocator() { return &device_allocator; }

Block* block_of(const c10::Storage& storage) {
  const auto& data = storage.data_ptr();
  return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : nullptr;
}

c10::DataPtr adopt(const c10::Storage& cpu, int device) {
  auto* block = new Block;
  block->data = cpu.mutable_data();
  block->bytes = static_cast<int64_t>(cpu.nbytes());
  block->device = device;
  try {
    if (block->bytes) block->piece = take_piece(device, stream_of(device), block->bytes);
  } catch (...) {
    delete block;
    throw;
  }
  block->owner = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(cpu.unsafeGetStorageImpl());
  return {block->data, block, &release, musa(device)};
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DeviceGuard guard(impl->device());
  auto data = device_allocator.allocate(bytes);
  auto kept = std::min(bytes, impl->nbytes());
  if (kept) std::memcpy(data.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  auto before = std::prev(after);
  return static_cast<const char*>(data) < before->first + before->second;
}

void record_next_as(const Stamp& stamp) { record_as = stamp; }

}  // namespace simmusa
