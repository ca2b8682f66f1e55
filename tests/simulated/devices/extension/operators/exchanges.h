// Exchanges between processes: the CPU's backend (gloo) exchanges the memory of the devices.
#pragma once

#include "host_tensors.h"
#include "operation_names.h"
#include "stream_order.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <set>
#include <utility>
#include <vector>

namespace simulated {

using c10::IValue;

// One collective call of a process. It has ended when it returns: here the exchange and the step never overlap.
class Exchange {
 public:
  Exchange(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), work_(op.schema().name()) {}

  void run() {
    refuse_while_capturing(current_device, "an exchange between processes");
    const size_t argument_count = op_.schema().arguments().size();
    const size_t result_count = op_.schema().returns().size();
    replace_last(argument_count, [this](const IValue& value) { return on_host(value); });
    op_.redispatchBoxed(kHostKeys, stack_);
    replace_last(result_count, [this](const IValue& value) { return on_device(value); });
  }

 private:
  struct Pair {
    Tensor on_device;
    Tensor on_host;
  };

  template <typename Function>
  void replace_last(size_t count, Function function) {
    for (size_t index = stack_->size() - count; index < stack_->size(); index++) {
      (*stack_)[index] = function((*stack_)[index]);
    }
  }

  // Lists may hold lists of tensors.
  template <typename Function>
  static IValue for_each_item(const IValue& value, Function function) {
    const auto list = value.toList();
    c10::impl::GenericList items(list.elementType());
    for (const IValue& item : list.vec()) {
      items.push_back(function(item));
    }
    return items;
  }

  IValue on_host(const IValue& value) {
    if (value.isList()) {
      return for_each_item(value, [this](const IValue& item) { return on_host(item); });
    }
    if (!value.isTensor() || !value.toTensor().is_cuda()) {
      return value;
    }
    const Tensor& tensor = value.toTensor();
    work_.note(tensor, true);
    pairs_.push_back({tensor, host_twin(tensor)});
    return pairs_.back().on_host;
  }

  IValue on_device(const IValue& value) {
    if (value.isList()) {
      return for_each_item(value, [this](const IValue& item) { return on_device(item); });
    }
    if (value.isTensor()) {
      for (const Pair& pair : pairs_) {
        if (is_same(pair.on_host, value.toTensor())) {
          return pair.on_device;
        }
      }
      return value;
    }
    if (value.isObject()) {
      const auto collective = value.toCustomClass<c10d::Work>();
      collective->wait();
      return ended_work();
    }
    return value;
  }

  // Work whose result is the tensors of the devices.
  c10::intrusive_ptr<c10d::Work> ended_work() const {
    std::vector<Tensor> tensors;
    std::set<DeviceIndex> indices;
    for (const Pair& pair : pairs_) {
      tensors.push_back(pair.on_device);
      indices.insert(pair.on_device.device().index());
    }
    std::vector<Device> devices;
    for (const DeviceIndex index : indices) {
      devices.emplace_back(c10::kCUDA, index);
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future->markCompleted(IValue(tensors));
    return c10d::Work::create_from_future(future);
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::vector<Pair> pairs_;
  WorkOnDevices work_;
};

inline void run_exchange(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Exchange(op, stack).run();
}

struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

TORCH_LIBRARY_IMPL(c10d, CUDA, library) {
  // Torch has kernels for CUDA already, which ask for a backend that a build for the CPU lacks.
  NoWarnings no_warnings;
  c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (begins_with(name.name, "c10d::") && op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      const std::string full_name = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      library.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_exchange>());
    }
  }
}

// Torch's DistributedDataParallel asks for the times of its work on a device.
struct ExchangeTimer final : public c10d::Timer {
  explicit ExchangeTimer(Device) {}

  std::optional<int64_t> measureDifference(Event, Event) override {
    return std::nullopt;
  }
};

}  // namespace simulated

namespace c10d {

using ExchangeTimer = simulated::ExchangeTimer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, ExchangeTimer)

}  // namespace c10d
