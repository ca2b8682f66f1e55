"""The trial of a block: its compiled and its eager forward and backward, from the same state, and compared."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from equipoise.extensions.compiled.comparison.outcome import Outcome, Result, results_of
from equipoise.interop.distributed.backward_calls import gradients_here
from equipoise.interop.torch.modules import has_module_hooks
from equipoise.parallel.equality import Tolerance, tolerance_of
from equipoise.parallel.snapshot.preserve_state import preserve_state
from equipoise.tree import leaves_of, map_leaves, tensors_in

__all__ = ["first_difference", "separated", "why_not_tried"]

Forward = Callable[..., Any]

# Arguments that a call of the forward does not change.
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def why_not_tried(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the reason why a block cannot be computed several times for a trial; None if it can.

    Args:
        block: The block.
        args: The arguments of its forward.
        kwargs: Its keyword arguments.
    """
    for name, part in block.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            return f"its SyncBatchNorm {name} exchanges, and a process that cannot compile it would not take part"
        if name and has_module_hooks(part):
            return f"there is a hook on its submodule {name}"
    for leaf in leaves_of([args, dict(kwargs)]):
        if isinstance(leaf, (Tensor, *_PLAIN)) or callable(leaf):
            continue
        name = type(leaf).__name__
        reason = f"it receives a {name}, which each call may change"
        if "Cache" in name:
            reason += " (models of transformers keep none with `config.use_cache = False`)"
        return reason
    return None


def first_difference(
    block: nn.Module, eager: Forward, compiled: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Return what a compiled forward or its backward computes otherwise than the eager one; None if they agree.

    All state is restored, and no gradient reaches a parameter.

    Args:
        block: The block.
        eager: Its forward, which receives the block and the arguments.
        compiled: The compiled forward.
        args: The arguments.
        kwargs: The keyword arguments.
    """
    outcomes = []
    for forward in (compiled, eager):
        # Activation checkpointing around the block counts what is saved, and would compute it anew for this backward.
        with preserve_state(block, containers=True), saved_tensors_hooks(_same, _same):
            outcomes.append(_compute(block, forward, args, kwargs))
    # Casts of parameters belong to the graph of the trial.
    torch.clear_autocast_cache()
    (of_compiled, _), (expected, tolerance) = outcomes
    return expected.first_difference(of_compiled, tolerance)


def separated(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, Any], list[Tensor]]:
    """Return arguments in memory of their own whose gradients end in leaves, and these leaves.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    leaves: list[Tensor] = []
    copies: dict[int, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # A forward may ask whether two arguments are the same.
        if id(value) not in copies:
            leaf = value.detach().requires_grad_(value.requires_grad)
            if value.requires_grad:
                leaves.append(leaf)
            # The forward may change its input in place, and a leaf must not change.
            copies[id(value)] = leaf.clone()
        return copies[id(value)]

    own_args, own_kwargs = map_leaves(copied, [tuple(args), dict(kwargs)])
    return (own_args, own_kwargs), leaves


def _compute(
    block: nn.Module, forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Outcome, Tolerance]:
    """Return what a forward and its backward compute, and how much another may differ from it."""
    # 1. The forward, of arguments whose gradients end here.
    (own_args, own_kwargs), leaves = separated(args, kwargs)
    output = forward(block, *own_args, **own_kwargs)

    # 2. The backward, of weights that differ from element to element.
    sources: dict[str, Tensor] = {}
    for name, parameter in block.named_parameters():
        if parameter.requires_grad:
            sources[f"the gradient of {name}"] = parameter
    for number, leaf in enumerate(leaves):
        sources[f"the gradient of its input {number}"] = leaf
    ends = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    gradients: Sequence[Tensor | None] = [None] * len(sources)
    if ends and sources:
        weights = list(map(_weights_like, ends))
        gradients = gradients_here(
            ends,
            list(sources.values()),
            weights,
            allow_unused=True,
        )

    # 3. What is compared.
    results = results_of(block, output)
    for name, gradient in zip(sources, gradients, strict=True):
        results.append(Result(name, gradient, is_gradient=True))
    return Outcome(results), _tolerance(output)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _weights_like(tensor: Tensor) -> Tensor:
    """Return the gradient with which the backward of a trial begins."""
    numbers = torch.arange(tensor.numel(), dtype=torch.float32, device=tensor.device)
    return numbers.sin().reshape(tensor.shape).to(tensor.dtype)


def _tolerance(output: Any) -> Tolerance:
    """Return the rounding of the dtype in which a block computes, that of autocast if it is on."""
    dtypes = set()
    for tensor in tensors_in(output):
        if tensor.is_floating_point():
            dtypes.add(tensor.dtype)
        kind = tensor.device.type
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
    return tolerance_of(dtypes)
