// Graphs: the operations of a capture, which a replay computes again on the same memory.
//
// CUDA computes nothing during a capture. Here the shapes of results must be known, so each operation is computed, and the
// end of the capture takes it back: other memory gets its values again, new memory is spoiled, and so are generators.
#pragma once

#include "../runtime/capturing.h"
#include "../runtime/generators.h"
#include "../runtime/launches.h"
#include "host_tensors.h"
#include "stream_order.h"

#include <functional>
#include <memory>
#include <vector>

namespace simulated {

// Memory that a capture uses and has not allocated. A graph does not keep it alive.
struct MemoryOfOthers {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const void* address;
  // Its values before the capture.
  std::vector<char> before;
  bool is_written = false;

  // The storage, if it is still where it was.
  c10::intrusive_ptr<c10::StorageImpl> present() const {
    auto found = storage.lock();
    const bool is_there = found && found->data() == address && found->nbytes() == before.size();
    return is_there ? found : c10::intrusive_ptr<c10::StorageImpl>();
  }
};

class Graph {
 public:
  explicit Graph(DeviceIndex device) : device_(device) {
    generator_state_ = default_generator(device).get_state();
    number_ = ++last_capture;
  }

  int64_t number() const {
    return number_;
  }

  // During the capture.

  // Notes memory that the next operation uses.
  void note(const Tensor& tensor) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (capture_of(tensor.storage().data_ptr()) == number_) {
      own_.push_back(tensor);
      return;
    }
    for (const auto& memory : others_) {
      if (memory.storage._unsafe_get_target() == storage) {
        return;
      }
    }
    const auto* bytes = static_cast<const char*>(storage->data());
    others_.push_back(
        {c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl()), bytes,
         std::vector<char>(bytes, bytes + storage->nbytes())});
  }

  void record(std::function<void()> call) {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_.push_back(std::move(call));
  }

  void end() {
    for (auto& memory : others_) {
      const auto storage = memory.present();
      if (!storage || memory.before.empty()) {
        continue;
      }
      memory.is_written = std::memcmp(storage->data(), memory.before.data(), memory.before.size()) != 0;
      std::memcpy(storage->mutable_data(), memory.before.data(), memory.before.size());
    }
    for (const Tensor& tensor : own_) {
      auto* storage = tensor.storage().unsafeGetStorageImpl();
      if (storage->nbytes() > 0) {
        std::memset(storage->mutable_data(), kPoison, storage->nbytes());
      }
    }
    host_generator_of(default_generator(device_)).set_state(generator_state_);
  }

  // After it.

  size_t size() const {
    return calls_.size();
  }

  void replay() {
    refuse_while_capturing(device_, "replay of a graph");
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> used;
    for (const auto& memory : others_) {
      used.push_back(memory.present());
      TORCH_CHECK(
          used.back(), "CUDA error: an illegal memory access was encountered (simulated): a graph uses memory of ",
          memory.before.size(), " bytes that was freed since its capture");
    }
    count_launch(device_, "CUDAGraph.replay");
    note_uses(used);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const auto& call : calls_) {
      call();
    }
  }

 private:
  void note_uses(const std::vector<c10::intrusive_ptr<c10::StorageImpl>>& used) {
    Work work(stream_in_use(device_), "CUDAGraph.replay");
    for (size_t index = 0; index < used.size(); index++) {
      if (Uses* uses = uses_of(used[index]->data_ptr())) {
        others_[index].is_written ? work.write(*uses) : work.read(*uses);
      }
    }
    for (const Tensor& tensor : own_) {
      note_use(work, tensor, true);
    }
  }

  DeviceIndex device_;
  int64_t number_;
  at::Tensor generator_state_;
  std::mutex mutex_;
  std::vector<std::function<void()>> calls_;
  // Memory of the graph's pool, which stays until the graph is released.
  std::vector<Tensor> own_;
  std::vector<MemoryOfOthers> others_;
};

// The graph of the present capture.
inline std::shared_ptr<Graph> captured_graph;

inline void begin_capture() {
  const DeviceIndex device = current_device;
  TORCH_CHECK(
      current_stream[device] != 0,
      "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on the"
      " default stream.)");
  TORCH_CHECK(capture_number == 0, "a simulated capture is under way already");
  captured_graph = std::make_shared<Graph>(device);
  captured_stream = stream_in_use(device);
  capture_is_broken = false;
  capture_number = captured_graph->number();
}

inline std::shared_ptr<Graph> end_capture() {
  TORCH_CHECK(capture_number != 0, "no capture is under way");
  TORCH_CHECK(is_capturing(current_device), "Capture must end on the same stream it began on.");
  capture_number = 0;
  captured_graph->end();
  const auto graph = std::exchange(captured_graph, nullptr);
  TORCH_CHECK(
      !capture_is_broken, "CUDA error: operation failed due to a previous error during capture (simulated)");
  return graph;
}

}  // namespace simulated
