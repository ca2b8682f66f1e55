// Notes which tensors an operation reads and writes, on which stream.
#pragma once

#include "../runtime/memory.h"

#include <ATen/ATen.h>

namespace simulated {

using at::Tensor;

inline Uses* uses_of(const Tensor& tensor) {
  return tensor.is_cuda() ? uses_of(tensor.storage().data_ptr()) : nullptr;
}

inline void note_use(Work& work, const Tensor& tensor, bool is_written) {
  Uses* uses = uses_of(tensor);
  if (uses == nullptr) {
    return;
  }
  if (is_written) {
    work.write(*uses);
  } else {
    work.read(*uses);
  }
}

// A copy between devices is work of the source's stream. It waits for that of the destination, which waits for it.
inline void note_copy(const Tensor& destination, const Tensor& source) {
  const auto stream = stream_in_use((source.is_cuda() ? source : destination).device().index());
  const auto other = stream_in_use((destination.is_cuda() ? destination : source).device().index());
  let_stream_wait(stream, clock_of(other));
  Work work(stream, "aten::copy_");
  note_use(work, source, false);
  note_use(work, destination, true);
  let_stream_wait(other, clock_of(stream));
}

// An operation, as work of the current stream of each device that it uses.
class WorkOnDevices {
 public:
  explicit WorkOnDevices(std::string name) : name_(std::move(name)) {}

  void note(const Tensor& tensor, bool is_written) {
    const DeviceIndex device = tensor.device().index();
    // It is a replay that uses the memory.
    if (is_capturing(device)) {
      return;
    }
    auto work = works_.find(device);
    if (work == works_.end()) {
      work = works_.emplace(device, Work(stream_in_use(device), name_)).first;
    }
    note_use(work->second, tensor, is_written);
  }

 private:
  std::string name_;
  std::map<DeviceIndex, Work> works_;
};

}  // namespace simulated
