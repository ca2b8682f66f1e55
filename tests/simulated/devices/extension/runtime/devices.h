// The devices: how many there are, and which is the current one of a thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace simulated {

using c10::Device;
using c10::DeviceIndex;

constexpr int kMostDevices = 8;

inline int device_count() {
  static const int count = [] {
    const char* text = std::getenv("EQUIPOISE_SIMULATED_DEVICES");
    const int wanted = text == nullptr ? 2 : std::atoi(text);
    TORCH_CHECK(0 < wanted && wanted <= kMostDevices, "EQUIPOISE_SIMULATED_DEVICES must lie between 1 and 8");
    return wanted;
  }();
  return count;
}

inline thread_local DeviceIndex current_device = 0;

inline void check_device(int index) {
  TORCH_CHECK(index < device_count(), "CUDA error: invalid device ordinal (simulated)");
}

// Makes a device the current one of this thread, and returns the one before. CUDA leaves the device as it is if the
// index is negative.
inline DeviceIndex exchange_current_device(int index) {
  check_device(index);
  const DeviceIndex before = current_device;
  if (index >= 0) {
    current_device = static_cast<DeviceIndex>(index);
  }
  return before;
}

// The index of a device; that of the current one for a device without an index.
inline DeviceIndex index_of(Device device) {
  return device.has_index() ? device.index() : current_device;
}

}  // namespace simulated
