// Memory of simulated devices. `data_ptr` is an address without access; the bytes are mapped elsewhere.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <map>
#include <set>

#include "queues.h"

namespace simulated {

constexpr size_t SPAN = size_t(1) << 40;  // address space of each device; no address is used twice
constexpr size_t PAGE = 4096,
                 UNIT = 512;  // allocations start at pages and are counted in units, as in CUDA

struct Block {
  int device;
  size_t offset, nbytes;  // nbytes: whole pages
  int64_t counted;
  c10::StreamId stream;
  std::set<c10::StreamId> also;  // streams of `record_stream`
};

struct Device {
  std::mutex mutex;
  char* addresses = nullptr;  // addresses of `data_ptr`, without access
  char* bytes = nullptr;
  size_t next = PAGE, capacity = size_t(1) << 30;
  std::map<size_t, Block*> blocks;  // keyed by offset
  c10::CachingDeviceAllocator::DeviceStats stats;
  Queue* queues[STREAMS] = {};
  std::atomic<int> dealt{0};
};

// Counts of all devices since the last call of `take_counts`.
struct Counts {
  std::atomic<int64_t> queued{0}, waited{0}, devices{0}, streams{0}, events{0}, allocations{0}, peer{0};
  std::atomic<int64_t> pinned{0}, pinned_bytes{0}, pageable{0}, pageable_bytes{0}, to_host{0},
      to_host_bytes{0};
};
inline Counts counts;

// The number of the copy between host and device, and of the allocation, that fails; 0 for none.
struct Faults {
  std::atomic<int64_t> copy{0}, allocation{0};
};
inline Faults faults;

inline bool is_due(std::atomic<int64_t>& left) { return left > 0 && --left == 0; }

inline int device_count = 2;
inline bool fills_fresh_memory = true;
inline Device* const devices = new Device[MOST_DEVICES];  // never destroyed, as the threads of its streams
inline thread_local int current_device = 0;
inline thread_local c10::StreamId current_streams[MOST_DEVICES] = {};

inline Device& device_of(int index) {
  TORCH_CHECK(index >= 0 && index < device_count, "simulated accelerator: there is no device ", index, " of ",
              device_count);
  Device& device = devices[index];
  std::lock_guard<std::mutex> lock(device.mutex);
  if (!device.addresses) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    device.addresses = static_cast<char*>(mmap(nullptr, SPAN, PROT_NONE, flags, -1, 0));
    device.bytes = static_cast<char*>(mmap(nullptr, SPAN, PROT_READ | PROT_WRITE, flags, -1, 0));
    TORCH_CHECK(device.addresses != MAP_FAILED && device.bytes != MAP_FAILED,
                "simulated accelerator: no room for its addresses");
  }
  return device;
}

inline Queue& queue_of(int index, c10::StreamId stream) {
  Device& device = device_of(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  auto& queue = device.queues[stream];
  if (!queue) queue = new Queue(index, stream);
  return *queue;
}

inline Queue& current_queue(int index) { return queue_of(index, current_streams[index]); }

template <typename Stats>
void count(Stats& stats, int64_t amount) {
  for (auto& stat : stats) amount > 0 ? stat.increase(amount) : stat.decrease(-amount);
}

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  Device& device = devices[block->device];
  {
    std::lock_guard<std::mutex> lock(device.mutex);
    count(device.stats.allocated_bytes, -block->counted), count(device.stats.reserved_bytes, -block->counted);
    count(device.stats.active_bytes, -block->counted), count(device.stats.allocation, -1);
  }
  Queue& queue = queue_of(block->device, block->stream);
  for (auto other : block->also) wait_for(queue, mark(queue_of(block->device, other)));
  queue.give([block, &device] {  // as if the next allocation on this stream reused the memory
    std::lock_guard<std::mutex> lock(device.mutex);
    madvise(device.bytes + block->offset, block->nbytes, MADV_DONTNEED);
    device.blocks.erase(block->offset);
    delete block;
  });
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t wanted) override {
    const c10::Device where(TYPE, current_device);
    Device& device = device_of(current_device);
    if (wanted == 0) return {nullptr, where};
    const size_t nbytes = (wanted + PAGE - 1) / PAGE * PAGE, counted = (wanted + UNIT - 1) / UNIT * UNIT;
    Block* block;
    {
      std::lock_guard<std::mutex> lock(device.mutex);
      const size_t used = device.stats.allocated_bytes[0].current;
      if (used + counted > device.capacity || is_due(faults.allocation)) {
        ++device.stats.num_ooms;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated accelerator: device ", current_device,
                         " is out of memory: ", wanted, " B wanted, ", used, " B of ", device.capacity,
                         " B used");
      }
      TORCH_CHECK(device.next + nbytes <= SPAN, "simulated accelerator: all addresses were given");
      block = new Block{
          current_device, device.next, nbytes, int64_t(counted), current_streams[current_device], {}};
      device.blocks[block->offset] = block;
      device.next += nbytes, ++counts.allocations;
      count(device.stats.allocated_bytes, counted), count(device.stats.reserved_bytes, counted);
      count(device.stats.active_bytes, counted), count(device.stats.allocation, 1);
    }
    if (fills_fresh_memory) memset(device.bytes + block->offset, 0xFF, nbytes);  // NaN or -1
    return {device.addresses + block->offset, block, &free_block, where};
  }

  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    auto* block = static_cast<Block*>(ptr.get_context());
    if (!block || stream.id() == block->stream) return;
    std::lock_guard<std::mutex> lock(devices[block->device].mutex);  // several threads record one block
    block->also.insert(stream.id());
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Device& device = device_of(index);
    std::lock_guard<std::mutex> lock(device.mutex);
    const size_t used = device.stats.allocated_bytes[0].current;
    return {device.capacity - std::min(device.capacity, used), device.capacity};
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    Device& device = device_of(index);
    std::lock_guard<std::mutex> lock(device.mutex);
    return device.stats;
  }

  void resetPeakStats(c10::DeviceIndex index) override {
    Device& device = device_of(index);
    std::lock_guard<std::mutex> lock(device.mutex);
    for (auto* stats : {&device.stats.allocated_bytes, &device.stats.reserved_bytes,
                        &device.stats.active_bytes, &device.stats.allocation})
      for (auto& stat : *stats) stat.reset_peak();
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "simulated accelerator: copy_data");
  }
};

// Returns the bytes of a device address. Raises an error if they were freed, in the order of the stream that
// allocated them.
inline char* bytes_at(int index, const void* address, size_t nbytes) {
  Device& device = device_of(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  const size_t offset = static_cast<const char*>(address) - device.addresses;
  auto found = device.blocks.upper_bound(offset);
  const bool is_there = offset < SPAN && found != device.blocks.begin() &&
                        (--found, offset + nbytes <= found->second->offset + found->second->nbytes);
  TORCH_CHECK(
      is_there, "simulated accelerator: memory of device ", index,
      " was used that is not allocated: it was freed on the "
      "stream that it was made on (record_stream or a wait is missing), or lies behind an allocation");
  return device.bytes + offset;
}

// Pinned host memory.
struct Pinned final : at::HostAllocator {
  inline static std::mutex mutex;
  inline static auto& ranges = *new std::map<uintptr_t, size_t>;

  static void add(uintptr_t first, size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex);
    TORCH_CHECK(ranges.emplace(first, nbytes).second,
                "simulated accelerator: this memory is registered already");
  }

  static void remove(uintptr_t first) {
    std::lock_guard<std::mutex> lock(mutex);
    TORCH_CHECK(ranges.erase(first), "simulated accelerator: this memory is not registered");
  }

  static bool has(const void* data, size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto first = reinterpret_cast<uintptr_t>(data);
    auto found = ranges.upper_bound(first);
    return found != ranges.begin() && (--found, first + nbytes <= found->first + found->second);
  }

  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    void* data = std::aligned_alloc(PAGE, (nbytes + PAGE - 1) / PAGE * PAGE);
    add(reinterpret_cast<uintptr_t>(data), nbytes);
    return {data, data, &give_back, c10::Device(c10::kCPU)};
  }

  static void give_back(void* data) {
    remove(reinterpret_cast<uintptr_t>(data));
    std::free(data);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    memcpy(target, source, nbytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

inline Memory& memory = *new Memory;
inline Pinned& pinned = *new Pinned;

}  // namespace simulated
