"""A traced graph, captured as a CUDA graph: later calls replay its kernels on the same memory.

    capture   inputs that are others in each step ──copied──> static inputs
              warm-up on a side stream, twice; all that it changes is restored
              capture on the side stream; nothing is computed
    replay    inputs are copied into the static ones; the kernels; outputs are copied

Parameters, buffers and other tensors of the module are read and written where they lie. So their places in memory are
compared before each replay.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from operator import ne
from typing import Any

import torch
from torch import Tensor

from equipoise.extensions.compiled.captured import host_work
from equipoise.extensions.compiled.interop.compiling import CompilerError, NewVariant, NotedInputs
from equipoise.interop.torch import foreach
from equipoise.interop.torch.modules import References, versions
from equipoise.parallel.snapshot import random_state

__all__ = ["CapturedGraph", "GraphPool"]

_HAS_MOVED = "a tensor that it uses lies at another place in memory again and again"
_IS_KEPT = (
    "gradients of an earlier step are still in use, so something keeps them: a hook, a callback or the optimiser. A"
    " replay would write into them. Keep clones"
)


class GraphPool:
    """The stream and the memory pool of all graphs of a run.

    Attributes:
        device: The CUDA device.
        stream: The stream of warm-ups and captures.
        is_broken: True if a capture has failed: nothing is captured any more.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _side_stream(device)
        self.is_broken = False
        # The pool that the present graphs share, and their number.
        self._handle: Any = None
        self._num_graphs = 0

    def capture(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Return a graph of the kernels of a function, and what the function returned.

        Args:
            function: Computes on the device alone.
        """
        if self.is_broken:
            raise CompilerError("an earlier capture has failed")
        graph = torch.cuda.CUDAGraph()
        # A pool whose graphs are all released cannot be used again.
        if not self._num_graphs:
            self._handle = torch.cuda.graph_pool_handle()
        # Threads of loaders may allocate pinned memory meanwhile.
        mode = "thread_local"
        current = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(graph, self._handle, self.stream, mode):
                result = function()
        except Exception:
            self.is_broken = True
            raise
        finally:
            # A capture that fails does not leave its stream.
            torch.cuda.set_stream(current)
            current.wait_stream(self.stream)
        self._num_graphs += 1
        return graph, result

    def release(self, graph: torch.cuda.CUDAGraph) -> None:
        """Release a captured graph.

        Args:
            graph: A result of `capture`.
        """
        graph.reset()
        self._num_graphs -= 1

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run a function on the side stream.

        Args:
            function: Computes on the device alone.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                function()
        finally:
            # Also after an error, which frees memory that the side stream has used.
            current.wait_stream(self.stream)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a device.

    CuBLAS keeps a workspace for each stream on which it has multiplied, which has 32 MiB on an H100 and stays.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _Capture:
    """A captured graph with its memory.

    Attributes:
        graph: The graph.
        inputs: The static input at each position; None where a tensor is used in its own place.
        places: The address of each of the other inputs.
        is_changed: For each input, whether the graph writes into it.
        outputs: The static outputs.
        of_inputs: For an output that is an input itself, the position of that.
        of_module: Positions of outputs in the memory of inputs that are used in their own place, such as parameters.
        shared: Positions of outputs that are handed out as they are.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor | None]
    places: list[int]
    is_changed: list[bool]
    outputs: Sequence[Any]
    of_inputs: dict[int, int]
    of_module: set[int]
    shared: set[int]


class CapturedGraph:
    """A function that computes a traced graph by replays. It is captured in each trial.

    Args:
        graph: The traced graph.
        noted: The inputs of a trial.
        pool: The stream and the memory pool of all graphs of the run.
        passing: Returns the tensors of the present step that are others in the next one, such as the batch.

    Attributes:
        obstacle: The reason for which a call could not replay the graph, although its conditions hold; None: no such.
    """

    def __init__(
        self, graph: Any, noted: NotedInputs, pool: GraphPool, passing: Callable[[], Collection[Tensor]]
    ) -> None:
        self._graph = graph
        self._noted = noted
        self._pool = pool
        self._passing = passing
        self._capture: _Capture | None = None
        # True from a capture to the end of its trial. In between, all outputs are handed out as they are.
        self._is_on_trial = False
        # The gradients, which are handed out as they are.
        self._lent: References | None = None
        self.obstacle: str | None = None

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Compute the graph.

        Raises:
            NewVariant: If it must be captured anew. Nothing was computed then.
        """
        if self._noted.are_due:
            return _replay(self._new_capture(inputs), inputs)
        capture = self._capture
        if capture is None:
            raise NewVariant
        if not _are_in_place(capture, inputs):
            self.obstacle = _HAS_MOVED
        elif self._lent is not None and self._lent.are_more():
            self.obstacle = _IS_KEPT
        if self.obstacle is not None:
            raise NewVariant
        return _replay(capture, inputs)

    def keep_only(self, tensors: Collection[Tensor]) -> None:
        """After a trial, hand out these outputs as they are, and copies of the others but those of the module.

        Args:
            tensors: Some of the outputs of the trial. Each replay writes into the same memory.
        """
        if self._capture is None or not self._is_on_trial:
            return
        self._is_on_trial = False
        addresses = {tensor.data_ptr() for tensor in tensors}
        lent = {}
        for position, output in enumerate(self._capture.outputs):
            if isinstance(output, Tensor) and output.data_ptr() in addresses:
                lent[position] = output
        self._capture.shared = self._capture.of_module.union(lent)
        self._lent = References(list(lent.values()))

    def release(self) -> None:
        """Release the graph and its memory."""
        if self._capture is not None:
            self._pool.release(self._capture.graph)
            self._capture = None
            self._lent = None

    def _new_capture(self, inputs: Sequence[Any]) -> _Capture:
        self.release()
        # 1. What a replay would not do.
        device = self._pool.device
        host_work.check_inputs(inputs, device)
        host_work.check_functions(self._graph)

        # 2. The memory of the inputs.
        passing = {id(tensor) for tensor in self._passing()}
        static = [_copy_of(tensor) if id(tensor) in passing else None for tensor in inputs]
        used = [_alias_of(tensor) if copy is None else copy for tensor, copy in zip(inputs, static, strict=True)]
        places = [tensor.data_ptr() for tensor in inputs]

        # 3. The warm-up finds the inputs that are changed. It draws no random numbers in the end.
        before = versions(used)
        with random_state.isolated():
            with host_work.on_device_only(device):
                self._pool.warm_up(lambda: self._graph.forward(*used))
            with host_work.without_waits():
                self._pool.warm_up(lambda: self._graph.forward(*used))
        after = versions(used)
        if before is None or after is None:
            raise CompilerError("it computes with tensors of inference mode")
        is_changed = list(map(ne, before, after))
        # What is changed by way of `tensor.data` keeps its version.
        for position, (tensor, copy) in enumerate(zip(inputs, static, strict=True)):
            if copy is not None and not torch.equal(tensor, copy):
                is_changed[position] = True
        self._noted.rewind()

        # 4. The capture.
        graph, outputs = self._pool.capture(lambda: self._graph.forward(*used))
        positions = {id(tensor): position for position, tensor in enumerate(used)}
        of_inputs = {}
        for position, output in enumerate(outputs):
            if id(output) in positions:
                of_inputs[position] = positions[id(output)]
        in_place = [tensor for tensor, copy in zip(inputs, static, strict=True) if copy is None]
        self._capture = _Capture(
            graph=graph,
            inputs=static,
            places=places,
            is_changed=is_changed,
            outputs=outputs,
            of_inputs=of_inputs,
            of_module=_in_memory_of(in_place, outputs),
            shared=set(range(len(outputs))),
        )
        self._is_on_trial = True
        return self._capture


def _copy_of(tensor: Tensor) -> Tensor:
    """Return a copy that is a leaf as the tensor is."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _alias_of(tensor: Tensor) -> Tensor:
    """Return a leaf in the same memory. Nodes of autograd that belong to the tensor itself may be of another stream."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _in_memory_of(tensors: Sequence[Tensor], outputs: Sequence[Any]) -> set[int]:
    """Return the positions of outputs that share memory with one of these tensors."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    positions = set()
    for position, output in enumerate(outputs):
        if isinstance(output, Tensor) and output.untyped_storage().data_ptr() in memory:
            positions.add(position)
    return positions


def _are_in_place(capture: _Capture, inputs: Sequence[Any]) -> bool:
    """Return True if all inputs that are not copied lie where they lay."""
    for tensor, copy, place in zip(inputs, capture.inputs, capture.places, strict=True):
        if copy is None and tensor.data_ptr() != place:
            return False
    return True


def _replay(capture: _Capture, inputs: Sequence[Any]) -> tuple[Any, ...]:
    # 1. The inputs.
    static: list[Tensor] = []
    passed: list[Tensor] = []
    changed: list[Tensor] = []
    changed_copies: list[Tensor] = []
    for tensor, copy, is_changed in zip(inputs, capture.inputs, capture.is_changed, strict=True):
        if copy is None:
            continue
        static.append(copy)
        passed.append(tensor)
        if is_changed:
            changed.append(tensor)
            changed_copies.append(copy)
    with torch.no_grad():
        _copy(static, passed)

        # 2. The kernels.
        capture.graph.replay()

        # 3. What they have changed, and copies of the outputs: the next replay writes into the same memory.
        _copy(changed, changed_copies)
        return _outputs(capture, inputs)


def _outputs(capture: _Capture, inputs: Sequence[Any]) -> tuple[Any, ...]:
    outputs = list(capture.outputs)
    copied = []
    for position, output in enumerate(outputs):
        if position in capture.of_inputs:
            outputs[position] = inputs[capture.of_inputs[position]]
        elif isinstance(output, Tensor) and position not in capture.shared:
            copied.append(position)
    sources = [outputs[position] for position in copied]
    copies = [torch.empty_like(source) for source in sources]
    _copy(copies, sources)
    for position, copy in zip(copied, copies, strict=True):
        outputs[position] = copy
    return tuple(outputs)


def _copy(tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors, by one kernel for those of a dtype."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for tensor, source in zip(tensors, sources, strict=True):
        group = groups.setdefault(tensor.dtype, ([], []))
        group[0].append(tensor)
        group[1].append(source)
    for group in groups.values():
        foreach.copy_(*group)
