"""A graph of torch.export beside the forward: what both compute, and what they leave, twice from one state."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.graph.call_structure import CallStructure
from equipoise.extensions.pipeline.graph.output_structure import OutputStructure
from equipoise.parallel.snapshot.preserve_state import preserve_state

__all__ = ["DiffersFromForward", "compare"]

MOST = 1e-10
"""The largest difference, as a share of the largest value."""


class DiffersFromForward(Exception):
    """Raised where a graph is not what the forward is."""


@dataclass
class _Trace:
    """Values that a call computes and leaves.

    Attributes:
        outputs: Its tensors.
        gradients: Those of the parameters and of the call's tensors.
        buffers: The network's buffers after it.
        generators: The states of generators after it.
        attributes: Attributes of modules after it, as text.
        logged: Names of the values that it logs.
    """

    outputs: list[Tensor]
    gradients: list[Tensor]
    buffers: list[Tensor]
    generators: list[Any]
    attributes: str
    logged: list[str]


def compare(
    network: nn.Module,
    forward: Callable[..., Any],
    run: Callable[[Sequence[Tensor]], Any],
    structure: CallStructure,
) -> None:
    """Computes a call by the forward and by a graph, from one state.

    Args:
        network: The network.
        forward: Its own forward.
        run: Computes the call with other tensors by the graph.
        structure: The call.

    Raises:
        DiffersFromForward: If anything differs.
    """

    def called(tensors: Sequence[Tensor]) -> Any:
        args, kwargs = structure.fill(tensors)
        return forward(*args, **kwargs)

    expected, actual = _trace(network, called, structure), _trace(network, run, structure)
    for field in fields(_Trace):
        if not _agree(getattr(expected, field.name), getattr(actual, field.name)):
            raise DiffersFromForward(f"{field.name} differ from those of the forward")


def _trace(network: nn.Module, compute: Callable[[Sequence[Tensor]], Any], structure: CallStructure) -> _Trace:
    logged: list[str] = []
    tensors = structure.copies_on(torch.device("cpu"))
    leaves = [tensor for tensor in tensors if tensor.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    with (
        preserve_state(network, containers=True),
        mock.patch.dict(vars(network), log=lambda name, *values, **options: logged.append(name)),
    ):
        # Copies that may be changed in place, which leaves may not.
        _, outputs = OutputStructure.of(compute([tensor.clone() for tensor in tensors]))
        wanted = [*(each for each in network.parameters() if each.requires_grad), *leaves]
        return _Trace(
            outputs=[output.detach().clone() for output in outputs],
            gradients=_gradients(outputs, wanted),
            buffers=[buffer.clone() for buffer in network.buffers()],
            generators=[torch.get_rng_state(), random.getstate()],
            attributes=repr([list(_attributes(module)) for module in network.modules()]),
            logged=logged,
        )


def _gradients(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
    losses = [output.square().sum() for output in outputs if output.requires_grad]
    if not losses:
        return []
    found = torch.autograd.grad(torch.stack(losses).sum(), wanted, allow_unused=True)
    return [torch.zeros_like(one) if other is None else other for one, other in zip(wanted, found, strict=True)]


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield plain attributes, and the lengths of containers."""
    for name, value in vars(module).items():
        if isinstance(value, bool | int | float | str):
            yield name, value
        elif isinstance(value, list | dict | set) and not name.startswith("_"):
            yield name, len(value)


def _agree(expected: Any, actual: Any) -> bool:
    if isinstance(expected, Tensor):
        if expected.shape != actual.shape or expected.dtype != actual.dtype:
            return False
        if not expected.is_floating_point() or not expected.numel():
            return torch.equal(expected, actual)
        return bool((expected - actual).abs().max() <= MOST * expected.abs().max())
    if isinstance(expected, list):
        return len(expected) == len(actual) and all(map(_agree, expected, actual))
    return bool(expected == actual)
