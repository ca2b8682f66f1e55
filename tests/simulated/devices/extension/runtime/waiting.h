// What the host waits for: copies to pinned memory, which arrive only when somebody waits for them.
#pragma once

#include "capturing.h"

#include <algorithm>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace simulated {

// A copy that has been started, and that nobody has waited for.
struct LateCopy {
  DeviceIndex device;
  int64_t stream;
  int64_t number;
  std::function<void()> arrive;
};

// A place in the order of work of a stream: everything started on it until `number`.
struct Mark {
  DeviceIndex device;
  int64_t stream;
  int64_t number;
};

constexpr int64_t kEveryNumber = INT64_MAX;
// Only the first reasons are kept, so that a long run does not fill the memory.
constexpr size_t kMostReasons = 10000;

inline std::mutex late_copies_mutex;
inline std::vector<LateCopy> late_copies;
inline int64_t last_number = 0;
inline std::vector<std::string> reasons;
inline std::atomic<int64_t> wait_count{0};
// As of torch.cuda.set_sync_debug_mode("error").
inline std::atomic<bool> waiting_is_refused{false};
// As of torch.cuda.set_sync_debug_mode("warn").
inline std::atomic<bool> waiting_is_warned_of{false};

inline bool is_covered(const LateCopy& copy, const Mark& mark) {
  const bool same_stream = mark.stream == kEveryStream || copy.stream == mark.stream;
  return copy.device == mark.device && same_stream && copy.number <= mark.number;
}

inline void start_late_copy(DeviceIndex device, int64_t stream, std::function<void()> arrive) {
  std::lock_guard<std::mutex> lock(late_copies_mutex);
  last_number++;
  late_copies.push_back({device, stream, last_number, std::move(arrive)});
}

// The place that a stream has reached now.
inline Mark mark_of(DeviceIndex device, int64_t stream) {
  std::lock_guard<std::mutex> lock(late_copies_mutex);
  return {device, stream, last_number};
}

inline bool has_arrived(const Mark& mark) {
  std::lock_guard<std::mutex> lock(late_copies_mutex);
  return std::none_of(late_copies.begin(), late_copies.end(), [&](const LateCopy& copy) {
    return is_covered(copy, mark);
  });
}

// Lets the host wait: the late copies until the mark arrive.
inline void wait_for(const Mark& mark, const std::string& reason) {
  refuse_while_capturing(mark.device, reason);
  wait_count++;
  std::vector<LateCopy> arriving;
  {
    std::lock_guard<std::mutex> lock(late_copies_mutex);
    if (reasons.size() < kMostReasons) {
      reasons.push_back(reason);
    }
    TORCH_CHECK(!waiting_is_refused, "called a synchronizing CUDA operation: ", reason);
    auto first_arriving = std::stable_partition(late_copies.begin(), late_copies.end(), [&](const LateCopy& copy) {
      return !is_covered(copy, mark);
    });
    std::move(first_arriving, late_copies.end(), std::back_inserter(arriving));
    late_copies.erase(first_arriving, late_copies.end());
  }
  if (waiting_is_warned_of) {
    TORCH_WARN("called a synchronizing CUDA operation: ", reason);
  }
  // Outside of the lock: a copy is an operation of the CPU.
  for (auto& copy : arriving) {
    copy.arrive();
  }
}

}  // namespace simulated
