"""Forwards that are recorded, and run in stages; and networks around a pattern, of WIDTH features."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.graph.call_structure import CallStructure, NetworkCall
from equipoise.extensions.pipeline.graph.output_structure import OutputStructure
from equipoise.extensions.pipeline.graph.stages import StageProgram, make_stages, may_cut
from equipoise.extensions.pipeline.graph.traced import Traced
from equipoise.extensions.pipeline.recording.tracing import trace
from tests.support.equality import assert_equal

__all__ = [
    "WIDTH",
    "Block",
    "assert_computes",
    "assert_followed",
    "block",
    "called",
    "run",
    "run_stages",
    "traced",
    "values",
]

WIDTH = 6


def values(*shape: int) -> Tensor:
    """Random values in float64."""
    return torch.randn(*shape, dtype=torch.float64)


class Block(nn.Module):
    """Two layers around what a subclass does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.pattern(self.first(x))))

    def pattern(self, x: Tensor) -> Tensor:
        return x


def block(pattern: Callable[[Any, Tensor], Any], **attributes: Any) -> Block:
    """A block with these attributes that does this between its layers."""
    made: Block = type("Patterned", (Block,), {"pattern": pattern})()
    for name, attribute in attributes.items():
        setattr(made, name, attribute)
    return made.double()


def traced(network: nn.Module, *args: Any, **kwargs: Any) -> Traced:
    """The recorded calls of a network's forward on the CPU."""
    structure = CallStructure(args, kwargs)
    return trace(NetworkCall(network, network.forward, structure, network, torch.device("cpu")))


def run_stages(stages: Sequence[StageProgram], tensors: Sequence[Tensor]) -> Any:
    """The output of stages, one after the other, for the tensors of a call."""
    values: Any = [tuple(tensors)]
    for stage in stages:
        values = stage.run(*values)
    return values


def run(made: Traced, *tensors: Tensor) -> Any:
    """The output of recorded calls, in one stage."""
    return run_stages(make_stages(made, [len(made.calls)]), tensors)


def called(made: Traced) -> list[str]:
    """The names of the modules that are called."""
    return [str(node.target).removeprefix("network.") for node in made.calls if node.op == "call_module"]


def _gradients(network: nn.Module, output: Any) -> list[Tensor | None]:
    """Gradients of the sum of squares of all floating tensors in an output."""
    network.zero_grad()
    _, tensors = OutputStructure.of(output)
    sum(tensor.square().sum() for tensor in tensors if tensor.is_floating_point()).backward()  # type: ignore[union-attr]
    return [parameter.grad for parameter in network.parameters()]


def assert_followed(network: nn.Module, *args: Any, **kwargs: Any) -> Traced:
    """Check that one stage and all cuts into two compute what the forward does, to the bit, for these arguments."""
    made = traced(network, *args, **kwargs)
    assert_computes(made, network, *args, **kwargs)
    return made


def assert_computes(made: Traced, network: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Check the same of calls that were recorded before."""
    structure = CallStructure(args, kwargs)
    assert made.fits(structure.tensors)
    expected = network(*args, **kwargs)
    expected_gradients = _gradients(network, expected)
    count = len(made.calls)
    places = [index + 1 for index, may in enumerate(may_cut(made)) if may and index + 1 < count]
    for ends in ([count], *([place, count] for place in places)):
        output = run_stages(make_stages(made, ends), structure.tensors)
        assert type(output) is type(expected)
        assert_equal(OutputStructure.of(expected)[1], OutputStructure.of(output)[1], ignore=("requires_grad",))
        assert_equal(expected_gradients, _gradients(network, output))
