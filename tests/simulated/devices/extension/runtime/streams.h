// Streams and events. Work is done in the order of the program; `order.h` finds where it might be done in another.
#pragma once

#include "memory.h"
#include "waiting.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simulated {

using c10::Stream;

inline std::atomic<int64_t> last_stream{0};

inline Stream stream_of(Device device, int64_t number) {
  return Stream(Stream::UNSAFE, Device(c10::kCUDA, index_of(device)), number);
}

inline void wait_for_device(DeviceIndex device, const std::string& reason) {
  const DeviceIndex index = device < 0 ? current_device : device;
  wait_for({index, kEveryStream, kEveryNumber}, reason);
  let_host_wait(index, kEveryStream);
}

inline void wait_for_stream(DeviceIndex device, int64_t stream, const std::string& reason) {
  wait_for({device, stream, kEveryNumber}, reason);
  let_host_wait(device, stream);
}

// What an event marks: which late copies have arrived, and which work is done.
struct RecordedEvent {
  Mark mark;
  Clock clock;
};

struct DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
  // Devices.

  c10::DeviceType type() const override {
    return c10::kCUDA;
  }

  Device exchangeDevice(Device device) const override {
    return Device(c10::kCUDA, exchange_current_device(device.index()));
  }

  Device getDevice() const override {
    return Device(c10::kCUDA, current_device);
  }

  void setDevice(Device device) const override {
    exchange_current_device(device.index());
  }

  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) {
      current_device = device.index();
    }
  }

  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(device_count());
  }

  void synchronizeDevice(const DeviceIndex device) const override {
    wait_for_device(device, "synchronize");
  }

  // Streams.

  Stream getStream(Device device) const override {
    return stream_of(device, current_stream[index_of(device)]);
  }

  Stream getDefaultStream(Device device) const override {
    return stream_of(device, 0);
  }

  Stream getNewStream(Device device, int /*priority*/) const override {
    return stream_of(device, ++last_stream);
  }

  Stream getStreamFromGlobalPool(Device device, bool /*is_high_priority*/) const override {
    return stream_of(device, ++last_stream);
  }

  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }

  bool queryStream(const Stream& stream) const override {
    const bool is_done = has_arrived({stream.device_index(), stream.id(), kEveryNumber});
    if (is_done) {
      let_host_wait(stream.device_index(), stream.id());
    }
    return is_done;
  }

  bool isStreamCapturing(const Stream& stream) const override {
    return capture_number != 0 && captured_stream == StreamName{stream.device_index(), stream.id()};
  }

  void synchronizeStream(const Stream& stream) const override {
    wait_for_stream(stream.device_index(), stream.id(), "stream.synchronize");
  }

  // Events.

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new RecordedEvent;
    }
    const StreamName name{stream.device_index(), stream.id()};
    *static_cast<RecordedEvent*>(*event) = {mark_of(name.device, name.number), clock_of(name)};
  }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<RecordedEvent*>(event);
  }

  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) {
      let_stream_wait({stream.device_index(), stream.id()}, static_cast<RecordedEvent*>(event)->clock);
    }
  }

  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    const auto& recorded = *static_cast<RecordedEvent*>(event);
    const bool is_done = has_arrived(recorded.mark);
    if (is_done) {
      let_host_wait(recorded.clock);
    }
    return is_done;
  }

  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      const auto& recorded = *static_cast<RecordedEvent*>(event);
      wait_for(recorded.mark, "event.synchronize");
      let_host_wait(recorded.clock);
    }
  }

  // Memory that a stream uses which does not own it.
  void recordDataPtrOnStream(const DataPtr& memory, const Stream& stream) const override {
    if (Uses* uses = uses_of(memory)) {
      std::lock_guard<std::mutex> lock(order_mutex);
      uses->recorded.insert({stream.device_index(), stream.id()});
    }
  }

  double elapsedTime(void*, void*, const DeviceIndex) const override {
    return 1.0;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard)

}  // namespace simulated
