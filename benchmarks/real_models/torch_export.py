"""Forwards that torch.export follows, in the place of the pipeline's recorder.

What surrounds a forward is the pipeline's: it takes arguments apart into tensors, and puts outputs of any class
together again. So torch.export sees tensors alone, and needs to know no class of a library.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from equipoise.extensions.pipeline.graph.call_structure import CallStructure
from equipoise.extensions.pipeline.graph.output_structure import OutputStructure

__all__ = ["ExportedForward", "Graph", "changing_dims", "export", "first_line"]

Dims = tuple[dict[int, Any], ...]
"""For each tensor of a call the dimensions that may change."""


class _Called(nn.Module):
    """A call of a network with tensors alone.

    Args:
        network: The network.
        forward: Its own forward.
        structure: The structure of the call.
        found: Gets the structure of the output. torch.export undoes what a forward does to the module itself.
    """

    def __init__(
        self,
        network: nn.Module,
        forward: Callable[..., Any],
        structure: CallStructure,
        found: Callable[[OutputStructure], None],
    ) -> None:
        super().__init__()
        self.network = network
        self._forward = forward
        self._structure = structure
        self._found = found

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self._structure.fill(tensors)
        output, results = OutputStructure.of(self._forward(*args, **kwargs))
        self._found(output)
        return tuple(results)


@dataclass(frozen=True)
class Graph:
    """A call as torch.export has followed it.

    Attributes:
        module: Its operations. They share the network's parameters.
        output: Builds the network's output.
        seconds: How long torch.export has taken.
        processor_seconds: How much of this time the processor has computed.
    """

    module: fx.GraphModule
    output: OutputStructure
    seconds: float
    processor_seconds: float

    @property
    def calls(self) -> list[fx.Node]:
        """All operations, in order."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether torch.export allows the tensors of a call: its guards are about sizes."""
        try:
            getattr(self.module, "_guards_fn", _allow)(*tensors)
        except AssertionError:
            return False
        return True

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """The output for the tensors of a call."""
        return self.output.fill(self.module(*tensors))


def _allow(*tensors: Tensor) -> None:
    """Allow all tensors."""


def changing_dims(one: CallStructure, other: CallStructure) -> Dims:
    """The dimensions in which tensors of two calls differ, as torch.export wants them."""
    dims = []
    for tensor, second in zip(one.tensors, other.tensors, strict=True):
        sizes = enumerate(zip(tensor.shape, second.shape, strict=True))
        dims.append({index: Dim.DYNAMIC for index, (size, changed) in sizes if size != changed})
    return tuple(dims)


def export(network: nn.Module, forward: Callable[..., Any], structure: CallStructure, dims: Dims | None) -> Graph:
    """Follows a call by torch.export.

    Args:
        network: The network, in the mode in which it will run.
        forward: Its own forward.
        structure: The call.
        dims: What may change; None: nothing.
    """
    start, start_of_processor = time.monotonic(), time.process_time()
    outputs: list[OutputStructure] = []
    called = _Called(network, forward, structure, outputs.append)
    called.training = network.training
    shapes = None if dims is None else (dims,)
    # Copies: guards about a view would ask for its base, which the tensors of other calls do not have.
    tensors = tuple(structure.copies_on(torch.device("cpu")))
    program = torch.export.export(called, tensors, dynamic_shapes=shapes, strict=False)
    module = program.module()
    return Graph(module, outputs[-1], time.monotonic() - start, time.process_time() - start_of_processor)


def first_line(error: Exception) -> str:
    """The class and the first line of an error."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"


class ExportedForward:
    """Stands in the place of a network's forward, and computes its calls by torch.export.

    Args:
        network: The network.
        dims: Returns for a call what may change in others; None: nothing, so calls of other shapes are followed anew.
        conditions: Returns for the network and a call what must be equal in calls with the same graph. A call that the
            guards of torch.export refuse is followed anew, too. Default: there is one graph, whatever changes.
        compare: Compares each graph with the forward, with the first call; see `torch_export_comparison`. Default:
            nothing is compared.

    Attributes:
        dims: See `dims`.
        graphs: What was followed.
    """

    def __init__(
        self,
        network: nn.Module,
        dims: Callable[[CallStructure], Dims] | None,
        conditions: Callable[[nn.Module, CallStructure], tuple[Any, ...]] | None = None,
        compare: Callable[..., None] | None = None,
    ) -> None:
        self.dims = dims
        self.graphs: list[Graph] = []
        self._network = network
        self._forward = network.forward
        self._conditions = conditions
        self._compare = compare
        self._by_key: dict[tuple[Any, ...], list[Graph]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        structure = CallStructure(args, kwargs)
        return self.graph_of(structure).run(structure.tensors)

    def graph_of(self, structure: CallStructure) -> Graph:
        """The graph for a call."""
        key: tuple[Any, ...] = ()
        if self._conditions is not None:
            key = self._conditions(self._network, structure)
        if self.dims is None:
            key += tuple(tensor.shape for tensor in structure.tensors)
        known = self._by_key.setdefault(key, [])
        for graph in known:
            if self._conditions is None or graph.fits(structure.tensors):
                return graph
        graph = self._export(structure)
        if self._compare is not None:
            self._compare(self._network, self._forward, graph.run, structure)
        known.append(graph)
        self.graphs.append(graph)
        return graph

    def _export(self, structure: CallStructure) -> Graph:
        dims = None if self.dims is None else self.dims(structure)
        try:
            return export(self._network, self._forward, structure, dims)
        except Exception:
            if self._conditions is None or dims is None:
                raise
        # Other sizes are refused: by the forward, or because this one is 1.
        return export(self._network, self._forward, structure, None)

    def difference(self, structure: CallStructure) -> float:
        """The largest difference between the tensors of both outputs, as a share of the largest value."""
        args, kwargs = structure.fill(structure.tensors)
        graph = self.graph_of(structure)
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            _, expected = OutputStructure.of(self._forward(*args, **kwargs))
            torch.manual_seed(0)
            actual = graph.module(*structure.tensors)
        largest = 0.0
        for one, other in zip(expected, actual, strict=True):
            if one.numel():
                distance = (one.double() - other.double()).abs().max()
                largest = max(largest, float(distance / one.double().abs().max().clamp(min=1e-300)))
        return largest

    @contextmanager
    def replacing(self, replaces: bool = True) -> Iterator[None]:
        """Takes the place within the context, unless it shall not."""
        if not replaces:
            yield
            return
        self._network.forward = self
        try:
            yield
        finally:
            del self._network.forward
