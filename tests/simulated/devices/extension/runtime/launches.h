// The kernels that were launched: how many on each device, and which ones while they are recorded.
#pragma once

#include "devices.h"

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace simulated {

inline std::atomic<int64_t> launches[kMostDevices];

// Index of the device, and name of the operation.
using Launch = std::pair<int, std::string>;

inline std::atomic<bool> launches_are_recorded{false};
inline std::mutex recorded_launches_mutex;
inline std::vector<Launch> recorded_launches;

inline void count_launch(DeviceIndex device, const std::string& name) {
  launches[device]++;
  if (launches_are_recorded) {
    std::lock_guard<std::mutex> lock(recorded_launches_mutex);
    recorded_launches.emplace_back(device, name);
  }
}

inline std::vector<Launch> take_launches() {
  std::lock_guard<std::mutex> lock(recorded_launches_mutex);
  return std::exchange(recorded_launches, {});
}

}  // namespace simulated
