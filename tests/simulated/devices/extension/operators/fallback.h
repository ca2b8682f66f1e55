// Every operation without a kernel of its own: the CPU computes it, in the memory of the device.
#pragma once

#include "../runtime/generators.h"
#include "../runtime/launches.h"
#include "../runtime/streams.h"
#include "graphs.h"
#include "host_tensors.h"
#include "operation_names.h"
#include "stream_order.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>
#include <utility>

namespace simulated {

using c10::IValue;

[[noreturn]] inline void refuse_devices(Device one, Device other, const std::string& name) {
  TORCH_CHECK(
      false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other,
      "! (in ", name, ")");
}

// One call of an operation.
class FallbackCall {
 public:
  FallbackCall(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op),
        stack_(stack),
        name_(op.schema().name()),
        argument_count_(op.schema().arguments().size()),
        first_argument_(stack->size() - argument_count_),
        takes_columns_(simulated::takes_columns(name_)),
        makes_view_(makes_view(name_)),
        work_(name_) {}

  void run() {
    TORCH_CHECK_NOT_IMPLEMENTED(is_known_to_host(), "a simulated CUDA device has no ", name_);
    if (takes_columns_) {
      check_columns();
    }
    replace_tensors();
    replace_generators();
    if (makes_host_wait(name_)) {
      wait_for_stream(device_index(), current_stream[device_index()], name_);
    }
    is_captured_ = !makes_view_ && is_capturing(device_index());
    if (is_captured_) {
      run_captured();
      return;
    }
    if (!makes_view_) {
      count_launch(device_index(), name_);
    }
    op_.redispatchBoxed(kHostKeys, stack_);
    note_changed_tensors();
    return_results();
  }

 private:
  // A tensor of a device, and the tensor of the CPU that stands for it.
  struct Pair {
    Tensor on_device;
    Tensor on_host;
  };

  // A result that is a new tensor: the index of the result, and that in its list.
  struct Result {
    size_t index;
    size_t item;
    Tensor on_host;
  };

  bool is_known_to_host() const {
    return op_.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
  }

  IValue& argument(size_t index) {
    return (*stack_)[first_argument_ + index];
  }

  DeviceIndex device_index() const {
    return device_.has_value() ? index_of(*device_) : current_device;
  }

  // A view uses no memory.
  void note_use(const Tensor& tensor, bool is_written) {
    if (!makes_view_) {
      work_.note(tensor, is_written);
    }
  }

  // Computes the operation, and records it for replays.
  void run_captured() {
    for (const Pair& pair : pairs_) {
      captured_graph->note(pair.on_device);
    }
    const torch::jit::Stack arguments(stack_->begin() + first_argument_, stack_->end());
    op_.redispatchBoxed(kHostKeys, stack_);
    note_changed_tensors();
    return_results();
    captured_graph->record([op = op_, arguments, results = new_results_] {
      torch::jit::Stack stack = arguments;
      op.redispatchBoxed(kHostKeys, &stack);
      for (const Result& result : results) {
        const IValue& value = stack[result.index];
        const Tensor computed = value.isTensor() ? value.toTensor() : value.toTensorVector()[result.item];
        result.on_host.copy_(computed);
      }
    });
  }

  // Arguments.

  // The tensors at one position of all lists must lie on one device. A number may lie on the CPU.
  void check_columns() {
    if (name_ == "aten::_foreach_copy_") {
      return;
    }
    std::vector<std::optional<Device>> devices;
    for (size_t index = 0; index < argument_count_; index++) {
      if (!argument(index).isTensorList()) {
        continue;
      }
      const auto tensors = argument(index).toTensorVector();
      devices.resize(std::max(devices.size(), tensors.size()));
      for (size_t column = 0; column < tensors.size(); column++) {
        const Tensor& tensor = tensors[column];
        if (tensor.is_cpu() && tensor.dim() == 0) {
          continue;
        }
        auto& device = devices[column];
        if (device.has_value() && *device != tensor.device()) {
          refuse_devices(*device, tensor.device(), name_);
        }
        device = tensor.device();
      }
    }
  }

  void replace_tensors() {
    for (size_t index = 0; index < argument_count_; index++) {
      IValue& value = argument(index);
      const auto* alias = op_.schema().arguments()[index].alias_info();
      is_written_ = alias != nullptr && alias->isWrite();
      if (value.isTensor()) {
        value = host_tensor_of(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> tensors;
        for (const Tensor& tensor : value.toTensorVector()) {
          tensors.push_back(host_tensor_of(tensor));
        }
        value = tensors;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> tensors;
        for (const std::optional<Tensor> tensor : value.toOptionalTensorList()) {
          tensors.push_back(tensor.has_value() ? std::make_optional(host_tensor_of(*tensor)) : std::nullopt);
        }
        value = tensors;
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        if (!device_.has_value()) {
          device_ = value.toDevice();
        }
        value = Device(c10::kCPU);
      }
    }
  }

  // The tensor of the CPU that stands for an argument.
  Tensor host_tensor_of(const Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.is_cpu()) {
      const bool may_be_here = takes_columns_ || tensor.dim() == 0 || takes_host_indices(name_);
      if (!may_be_here) {
        refuse_devices(device_.value_or(Device(c10::kCUDA, current_device)), tensor.device(), name_);
      }
      return tensor;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.is_cuda(), "a simulated CUDA device cannot compute with ", tensor.device());
    if (device_.has_value() && *device_ != tensor.device() && !takes_columns_) {
      refuse_devices(*device_, tensor.device(), name_);
    }
    if (!device_.has_value()) {
      device_ = tensor.device();
    }
    note_use(tensor, is_written_);
    // Tensors that are the same, or share memory, do so on the CPU as well.
    for (const Pair& pair : pairs_) {
      if (is_same(pair.on_device, tensor)) {
        return pair.on_host;
      }
    }
    for (const Pair& pair : pairs_) {
      if (shares_storage(pair.on_device, tensor)) {
        Tensor twin = tensor_over(pair.on_host.storage(), kHostKeys, tensor);
        pairs_.push_back({tensor, twin});
        return twin;
      }
    }
    Tensor twin = host_twin(tensor);
    pairs_.push_back({tensor, twin});
    return twin;
  }

  // Random numbers come from the generator of the device.
  void replace_generators() {
    for (size_t index = 0; index < argument_count_; index++) {
      const auto type = op_.schema().arguments()[index].type()->annotation_str();
      if (type.find("Generator") == std::string::npos) {
        continue;
      }
      IValue& value = argument(index);
      if (value.isNone()) {
        value = host_generator_of(default_generator(device_index()));
        continue;
      }
      const at::Generator generator = value.toGenerator();
      if (is_capturing(device_index()) && generator != default_generator(device_index())) {
        break_capture("a generator that is not registered with the graph");
      }
      TORCH_CHECK(
          generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
          generator.device().type(), "'");
      value = host_generator_of(generator);
    }
  }

  // Results.

  // An operation may have given a tensor other memory, or another shape.
  void note_changed_tensors() {
    for (const Pair& pair : pairs_) {
      auto* storage = pair.on_device.storage().unsafeGetStorageImpl();
      const auto& host_storage = pair.on_host.storage();
      if (host_storage.nbytes() > 0 && host_storage.data() != storage->data()) {
        if (is_captured_ && storage->nbytes() > 0) {
          break_capture("a result that grows, in " + name_);
        }
        storage->set_data_ptr_noswap(memory_around(host_storage, pair.on_device.device().index()));
        storage->set_nbytes(host_storage.nbytes());
        note_use(pair.on_device, true);
      }
      auto* impl = pair.on_device.unsafeGetTensorImpl();
      const Tensor& twin = pair.on_host;
      if (impl->sizes() != twin.sizes() || impl->strides() != twin.strides()) {
        impl->set_sizes_and_strides(twin.sizes(), twin.strides(), twin.storage_offset());
      }
    }
  }

  void return_results() {
    const size_t count = op_.schema().returns().size();
    const size_t first = stack_->size() - count;
    for (size_t index = 0; index < count; index++) {
      IValue& value = (*stack_)[first + index];
      if (value.isTensor()) {
        value = device_tensor_of(value.toTensor(), index, 0);
      } else if (value.isTensorList()) {
        c10::List<Tensor> tensors;
        size_t item = 0;
        for (const Tensor& tensor : value.toTensorVector()) {
          tensors.push_back(device_tensor_of(tensor, index, item++));
        }
        value = tensors;
      }
    }
  }

  // The tensor of the device for a result: an argument, a view of one, or a new tensor.
  Tensor device_tensor_of(const Tensor& result, size_t index, size_t item) {
    if (!result.defined() || !result.is_cpu()) {
      return result;
    }
    for (const Pair& pair : pairs_) {
      if (is_same(pair.on_host, result)) {
        return pair.on_device;
      }
    }
    for (const Pair& pair : pairs_) {
      if (shares_storage(pair.on_host, result)) {
        return device_view(pair.on_device, result);
      }
    }
    const Tensor tensor = device_tensor(result, device_index());
    note_use(tensor, true);
    if (is_captured_) {
      captured_graph->note(tensor);
      new_results_.push_back({index, item, result});
    }
    return tensor;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const std::string& name_;
  const size_t argument_count_;
  const size_t first_argument_;
  const bool takes_columns_;
  const bool makes_view_;
  WorkOnDevices work_;
  // Whether the operation writes to the argument that is being replaced.
  bool is_written_ = false;
  std::vector<Pair> pairs_;
  bool is_captured_ = false;
  std::vector<Result> new_results_;
  // The device of the first tensor, or that which the call names.
  std::optional<Device> device_;
};

inline void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  FallbackCall(op, stack).run();
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace simulated
