// Operations that torch calls on CUDA devices alone, or that have another kernel there.
#pragma once

#include "../runtime/generators.h"
#include "host_tensors.h"

#include <torch/library.h>

#include <tuple>

namespace simulated {

using OptionalTensor = std::optional<Tensor>;

inline bool is_given(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

inline Tensor plus(const Tensor& sum, const OptionalTensor& addend) {
  return is_given(addend) ? sum + *addend : sum;
}

// Dropout. The kernel of the CPU draws from the generator of the CPU.

inline std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0 || !train.value_or(true)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  const double kept = 1 - p;
  const double scale = kept == 0 ? 0 : 1 / kept;
  const Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(kept);
  return {input.mul(mask).mul_(scale), mask};
}

// LSTM, in the formulas of its documentation. The workspace holds the gates after their activations.

inline std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell_before, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const Tensor sums = plus(plus(input_gates, input_bias) + hidden_gates, hidden_bias);
  const auto gates = sums.chunk(4, 1);
  const Tensor input = gates[0].sigmoid();
  const Tensor forget = gates[1].sigmoid();
  const Tensor candidate = gates[2].tanh();
  const Tensor output = gates[3].sigmoid();
  const Tensor cell = forget * cell_before + input * candidate;
  return {output * cell.tanh(), cell, at::cat({input, forget, candidate, output}, 1)};
}

inline std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hidden, const OptionalTensor& grad_cell, const Tensor& cell_before, const Tensor& cell,
    const Tensor& workspace, bool has_bias) {
  if (!is_given(grad_hidden) && !is_given(grad_cell)) {
    return {};
  }
  const auto gates = workspace.chunk(4, 1);
  const Tensor& input = gates[0];
  const Tensor& forget = gates[1];
  const Tensor& candidate = gates[2];
  const Tensor& output = gates[3];
  const Tensor squashed = cell.tanh();
  const Tensor of_hidden = is_given(grad_hidden) ? *grad_hidden : at::zeros_like(cell);
  const Tensor of_cell = plus(of_hidden * output * (1 - squashed * squashed), grad_cell);
  const Tensor of_gates = at::cat(
      {
          of_cell * candidate * input * (1 - input),
          of_cell * cell_before * forget * (1 - forget),
          of_cell * input * (1 - candidate * candidate),
          of_hidden * squashed * output * (1 - output),
      },
      1);
  return {of_gates, of_cell * forget, has_bias ? of_gates.sum(0) : Tensor()};
}

// GRU, in the formulas of its documentation. The workspace holds what the backward needs.

inline std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden_before,
    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto of_input = plus(input_gates, input_bias).chunk(3, 1);
  const auto of_hidden = plus(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = (of_input[0] + of_hidden[0]).sigmoid();
  const Tensor update = (of_input[1] + of_hidden[1]).sigmoid();
  const Tensor candidate = (of_input[2] + reset * of_hidden[2]).tanh();
  const Tensor hidden = candidate + update * (hidden_before - candidate);
  return {hidden, at::cat({reset, update, candidate, hidden_before, of_hidden[2]}, 1)};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hidden, const Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const Tensor& reset = parts[0];
  const Tensor& update = parts[1];
  const Tensor& candidate = parts[2];
  const Tensor& hidden_before = parts[3];
  const Tensor& hidden_candidate = parts[4];
  const Tensor of_update = grad_hidden * (hidden_before - candidate) * update * (1 - update);
  const Tensor of_candidate = grad_hidden * (1 - update) * (1 - candidate * candidate);
  const Tensor of_reset = of_candidate * hidden_candidate * reset * (1 - reset);
  const Tensor of_input_gates = at::cat({of_reset, of_update, of_candidate}, 1);
  const Tensor of_hidden_gates = at::cat({of_reset, of_update, of_candidate * reset}, 1);
  return {
      of_input_gates,
      of_hidden_gates,
      grad_hidden * update,
      has_bias ? of_input_gates.sum(0) : Tensor(),
      has_bias ? of_hidden_gates.sum(0) : Tensor(),
  };
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("native_dropout", native_dropout);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace simulated
