// Whether a stream is being captured: its operations are then recorded in a graph, and what needs the host is an error.
#pragma once

#include "order.h"

namespace simulated {

// As in CUDA, one stream is captured at a time; 0: none. Threads in other streams compute as ever.
inline std::atomic<int64_t> capture_number{0};
inline std::atomic<int64_t> last_capture{0};
inline StreamName captured_stream{};
// Set by an operation that cannot be captured: the capture cannot end well any more.
inline std::atomic<bool> capture_is_broken{false};

// Whether the current stream of a device is being captured.
inline bool is_capturing(DeviceIndex device) {
  return capture_number != 0 && device >= 0 && captured_stream == stream_in_use(device);
}

[[noreturn]] inline void break_capture(const std::string& reason) {
  capture_is_broken = true;
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (simulated): ", reason);
}

inline void refuse_while_capturing(DeviceIndex device, const std::string& reason) {
  if (is_capturing(device < 0 ? current_device : device)) {
    break_capture(reason);
  }
}

}  // namespace simulated
