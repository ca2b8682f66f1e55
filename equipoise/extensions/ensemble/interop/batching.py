"""Torch's `vmap`, which computes a function for each row of its arguments together, without its preparations.

`torch.vmap` flattens arguments, dimensions and results as nested structures in each call, which costs as much as the
operations of a small network. The private names here are the steps that it takes between; without them, it is called.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from equipoise.interop.adapters import find

__all__ = ["batched_linear", "compute_batched"]

_add_batch_dim: Any = find("torch._C._functorch._add_batch_dim")
_remove_batch_dim: Any = find("torch._C._functorch._remove_batch_dim")
_vmap_increment_nesting: Any = find("torch._C._functorch._vmap_increment_nesting")
_vmap_decrement_nesting: Any = find("torch._C._functorch._vmap_decrement_nesting")
_maybe_current_level: Any = find("torch._C._functorch.maybe_current_level")
_maybe_get_level: Any = find("torch._C._functorch.maybe_get_level")
# Without the steps, `torch.vmap` itself is called.
_has_steps = None not in (_add_batch_dim, _remove_batch_dim, _vmap_increment_nesting, _vmap_decrement_nesting)
# Without the levels, torch's own rule for linear layers applies.
_has_levels = _has_steps and None not in (_maybe_current_level, _maybe_get_level)

# The level of a tensor that belongs to no transform.
_NO_LEVEL = -1


class _LinearTogether(TorchFunctionMode):
    """Computes each linear layer by `batched_linear`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is linear:
            function = batched_linear
        return function(*args, **kwargs or {})


def compute_batched(
    function: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    tensors: Sequence[Tensor],
    dims: Sequence[int | None],
    size: int,
    randomness: str,
) -> list[Tensor]:
    """Compute a function for each row of tensors together, as `torch.vmap` does; linear layers by `batched_linear`.

    Without the private names of these layers, or of the steps of `torch.vmap`, torch's own rules apply.

    Args:
        function: Takes and returns a list of tensors.
        tensors: Its arguments.
        dims: The dimension of the rows of each argument; None: all rows have the same value.
        size: The number of rows.
        randomness: "error" or "different", as for `torch.vmap`.

    Returns:
        The results, whose first dimension is that of the rows.
    """
    if not _has_steps:
        in_dims = tuple(dims)
        return list(torch.vmap(lambda *rows: tuple(function(rows)), in_dims, randomness=randomness)(*tensors))
    level = _vmap_increment_nesting(size, randomness)
    try:
        batched = []
        for tensor, dim in zip(tensors, dims, strict=True):
            if dim is not None:
                tensor = _add_batch_dim(tensor, dim, level)
            batched.append(tensor)
        with _LinearTogether() if _has_levels else nullcontext():
            results = function(batched)
        return [_remove_batch_dim(result, level, size, 0) for result in results]
    finally:
        _vmap_decrement_nesting()


def batched_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer of each row within `compute_batched`, by one batched product of matrices.

    The rule of torch for `linear` takes it apart into a dozen operations, each of which is a node of the backward.
    Nothing public shows how deep calls of `vmap` are nested, or which of them a tensor belongs to.

    Args:
        input: (samples, inputs) in each row, or for all of them. Other shapes are left to torch.
        weight: (outputs, inputs) in each row.
        bias: (outputs) in each row. Default: None, there is none.
    """
    if not _has_levels:
        return linear(input, weight, bias)
    level = _maybe_current_level()
    parameters = [parameter for parameter in (weight, bias) if parameter is not None]
    have_rows = all(_maybe_get_level(parameter) == level for parameter in parameters)
    # Within other transforms of the user, and for what all rows share, torch's own rule is right.
    if level is None or not have_rows or input.dim() != 2 or _maybe_get_level(input) not in (level, _NO_LEVEL):
        return linear(input, weight, bias)
    # Features that all rows share are expanded to as many.
    rows_of_weight, *rows_of_bias = [_remove_batch_dim(parameter, level, 0, 0) for parameter in parameters]
    rows_of_features = _remove_batch_dim(input, level, len(rows_of_weight), 0)
    transposed = rows_of_weight.mT
    if rows_of_bias:
        result = torch.baddbmm(rows_of_bias[0].unsqueeze(1), rows_of_features, transposed)
    else:
        result = torch.bmm(rows_of_features, transposed)
    rows: Tensor = _add_batch_dim(result, 0, level)
    return rows
