// The memory of the devices, with a limit for each, and pinned memory of the host.
#pragma once

#include "capturing.h"

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <cstring>
#include <mutex>
#include <set>

namespace simulated {

using c10::DataPtr;

constexpr int64_t kCapacity = int64_t{1} << 33;
constexpr size_t kAlignment = 64;
// All bits set: numbers are not a number, integers are -1. Memory that is read before it is written spoils the result.
constexpr int kPoison = 0xFF;

inline std::atomic<int64_t> allocated_bytes[kMostDevices];
inline std::atomic<int64_t> peak_bytes[kMostDevices];
// Bytes that may be allocated on each device; 0: its capacity.
inline std::atomic<int64_t> limit_bytes[kMostDevices];
inline std::atomic<int64_t> allocation_count[kMostDevices];

inline int64_t total_bytes(DeviceIndex device) {
  const int64_t limit = limit_bytes[device];
  return limit == 0 ? kCapacity : limit;
}

// Counts bytes as allocated on a device. Raises torch.OutOfMemoryError if they do not fit.
inline void count_bytes(DeviceIndex device, int64_t bytes) {
  constexpr double kMebibyte = 1 << 20;
  const int64_t total = total_bytes(device);
  int64_t before = allocated_bytes[device];
  do {
    if (before + bytes > total) {
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes / kMebibyte, " MiB. GPU ",
          static_cast<int>(device), " has a total capacity of ", total / kMebibyte, " MiB of which ",
          (total - before) / kMebibyte, " MiB is free. (simulated)");
    }
  } while (!allocated_bytes[device].compare_exchange_weak(before, before + bytes));
  const int64_t now = before + bytes;
  allocation_count[device]++;
  int64_t peak = peak_bytes[device];
  while (now > peak && !peak_bytes[device].compare_exchange_weak(peak, now)) {
  }
}

inline void* allocate_poisoned(size_t bytes) {
  const size_t whole_lines = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* data = std::aligned_alloc(kAlignment, whole_lines);
  TORCH_CHECK(data != nullptr, "the host has no memory left for a simulated device");
  std::memset(data, kPoison, whole_lines);
  return data;
}

// One allocation: memory of its own, or that of a storage of the CPU, into which an operation has written.
struct Allocation {
  DeviceIndex device;
  int64_t bytes;
  void* data;
  c10::Storage storage;
  Uses uses;
  // The number of the capture that has allocated it; 0: none.
  int64_t capture;
};

inline int64_t present_capture(DeviceIndex device) {
  return is_capturing(device) ? capture_number.load() : 0;
}

inline void release(void* context) {
  auto* allocation = static_cast<Allocation*>(context);
  // The pool of a graph keeps its memory to itself.
  if (allocation->capture == 0) {
    note_freed(allocation->uses);
  }
  allocated_bytes[allocation->device] -= allocation->bytes;
  std::free(allocation->data);
  delete allocation;
}

class DeviceAllocator final : public c10::Allocator {
 public:
  DataPtr allocate(size_t bytes) override {
    const DeviceIndex device = current_device;
    void* data = nullptr;
    if (bytes > 0) {
      count_bytes(device, static_cast<int64_t>(bytes));
      data = allocate_poisoned(bytes);
    }
    auto* allocation = new Allocation{
        device, static_cast<int64_t>(bytes), data, {}, {stream_in_use(device)}, present_capture(device)};
    return {data, allocation, &release, Device(c10::kCUDA, device)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    std::memcpy(destination, source, count);
  }
};

inline DeviceAllocator device_allocator;

// Higher than that of the allocators which torch registers.
constexpr uint8_t kAllocatorPriority = 200;

inline const bool allocator_is_set = [] {
  c10::SetAllocator(c10::kCUDA, &device_allocator, kAllocatorPriority);
  return true;
}();

// Memory of a device that is the storage of a tensor of the CPU.
inline DataPtr memory_around(const c10::Storage& storage, DeviceIndex device) {
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  if (bytes > 0) {
    count_bytes(device, bytes);
  }
  auto* allocation =
      new Allocation{device, bytes, nullptr, storage, {stream_in_use(device)}, present_capture(device)};
  return {storage.mutable_data(), allocation, &release, Device(c10::kCUDA, device)};
}

// Who has used memory of a device; a null pointer for memory that is not of our allocators.
inline Uses* uses_of(const DataPtr& memory) {
  if (memory.get_deleter() != &release) {
    return nullptr;
  }
  return &static_cast<Allocation*>(memory.get_context())->uses;
}

// The number of the capture that has allocated memory; 0: none.
inline int64_t capture_of(const DataPtr& memory) {
  return memory.get_deleter() == &release ? static_cast<Allocation*>(memory.get_context())->capture : 0;
}

inline std::mutex pinned_mutex;
inline std::set<const void*> pinned_addresses;

inline bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  return pinned_addresses.count(address) > 0;
}

inline void release_pinned(void* data) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_addresses.erase(data);
  }
  std::free(data);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  DataPtr allocate(size_t bytes) override {
    void* data = allocate_poisoned(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_addresses.insert(data);
    return {data, data, &release_pinned, Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release_pinned;
  }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    std::memcpy(destination, source, count);
  }
};

inline PinnedAllocator pinned_allocator;

}  // namespace simulated
