// Operations on lists of tensors: one kernel for all of a list where CUDA has one, otherwise one for each tensor.
#pragma once

#include "fallback.h"

namespace simulated {

// The conditions of torch's kernels for lists.
class KernelForLists {
 public:
  KernelForLists(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : first_argument_(stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size())),
        end_(stack.end()) {}

  bool is_possible() {
    for (auto argument = first_argument_; argument != end_; argument++) {
      if (argument->isTensorList() && !takes_list(argument->toTensorVector())) {
        return false;
      }
    }
    return !first_list_.empty() && takes_factors();
  }

 private:
  // All tensors have the device and dtype of the first one, and those at one position have one layout.
  bool takes_list(const std::vector<Tensor>& list) {
    if (list.empty()) {
      return false;
    }
    if (first_list_.empty()) {
      first_list_ = list;
    }
    if (list.size() != first_list_.size()) {
      return false;
    }
    const Tensor& first = first_list_[0];
    for (size_t index = 0; index < list.size(); index++) {
      const Tensor& tensor = list[index];
      const Tensor& same_position = first_list_[index];
      const bool is_alike = tensor.is_cuda() && tensor.device() == first.device() &&
          tensor.scalar_type() == first.scalar_type() && tensor.layout() == c10::kStrided;
      if (!is_alike || tensor.sizes() != same_position.sizes() || tensor.strides() != same_position.strides()) {
        return false;
      }
    }
    return true;
  }

  // A common factor that is a tensor has the dtype of the list.
  bool takes_factors() const {
    for (auto argument = first_argument_; argument != end_; argument++) {
      if (!argument->isTensor()) {
        continue;
      }
      const Tensor& factor = argument->toTensor();
      if (!factor.is_cuda() || factor.scalar_type() != first_list_[0].scalar_type()) {
        return false;
      }
    }
    return true;
  }

  torch::jit::Stack::const_iterator first_argument_;
  torch::jit::Stack::const_iterator end_;
  std::vector<Tensor> first_list_;
};

// The tensors into which an operation writes.
inline std::vector<Tensor> written_tensors(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  std::vector<Tensor> written;
  for (size_t index = 0; index < arguments.size(); index++) {
    const auto* alias = arguments[index].alias_info();
    if (alias != nullptr && alias->isWrite() && stack[first + index].isTensorList()) {
      const auto tensors = stack[first + index].toTensorVector();
      written.insert(written.end(), tensors.begin(), tensors.end());
    }
  }
  return written;
}

inline void run_list(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  if (KernelForLists(op, *stack).is_possible()) {
    const auto written = written_tensors(op, *stack);
    FallbackCall(op, stack).run();
    // As the kernels do: autograd counts the changes of single tensors alone.
    for (const Tensor& tensor : written) {
      if (!tensor.is_inference()) {
        tensor.unsafeGetTensorImpl()->bump_version();
      }
    }
  } else {
    // The CPU has no kernels for lists: its own call one operation for each tensor, on whichever device that lies.
    op.redispatchBoxed(kHostKeys, stack);
  }
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (begins_with(name.name, "aten::_foreach_")) {
      const std::string full_name = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      library.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_list>());
    }
  }
}

}  // namespace simulated
