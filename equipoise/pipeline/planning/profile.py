"""Profile of each call of a network: time forward and backward, activations, sizes of outputs.

The whole network is gone through several times, and of each call the quickest counts: somebody else at work for a
moment, or memory that is touched for the first time, disturbs one pass and not all of them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.interop.torch.modules import versions
from equipoise.parallel.snapshot.step_snapshot import StepSnapshot
from equipoise.pipeline.execution.placement import move
from equipoise.pipeline.graph.forward_effects import ForwardEffects
from equipoise.pipeline.graph.split_backward import SplitBackward
from equipoise.pipeline.graph.stages import crossing, map_tensors, may_cut, names_of, plain
from equipoise.pipeline.graph.tracing import Traced, writes_in_place
from equipoise.pipeline.planning.activation_memory import SavedTensors, moment
from equipoise.pipeline.planning.stage_costs import Block

__all__ = ["add_rest", "compute_uncut", "merge_blocks", "now", "placed", "profile_calls", "used_tensors"]

Placed = Callable[[nn.Module | None, torch.device], AbstractContextManager[None]]

_LEAST, _MOST = 3, 8  # passes
_FINEST = 200  # a block takes at least such a part of an average stage, where it may be cut


def profile_calls(
    traced: Traced,
    module: nn.Module,
    tensors: Sequence[Tensor],
    device: torch.device,
    *,
    seconds: float = 3.0,
    split: bool = False,
    rest: Callable[[Traced, Any], None] | None = None,
) -> list[Block]:
    """Measures every call of a forward, one after the other, on a device; nothing is changed by it.

    Args:
        traced: The forward.
        module: The user's module, whose buffers and metrics are brought back.
        tensors: What it is called with; one micro-batch.
        device: Where. Parameters that lie elsewhere are there while their call is measured.
        seconds: No pass begins after so many, once there were three. Default: 3.
        split: Whether backwards will be in two parts. Default: False.
        rest: Is called with the forward and what it returned, at the end. Default: nothing is.

    Returns:
        A block for each call.
    """
    rewind, effects = StepSnapshot(module, [device]), ForwardEffects(module)
    rewind.mark()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            given = tuple(tensor.detach().clone().to(device) for tensor in tensors)
            begin = time.perf_counter()
            blocks, output = _profile(traced, given, device, first=True, split=split)
            for count in range(1, _MOST):
                if count >= _LEAST and time.perf_counter() - begin > seconds:
                    break
                blocks = list(map(_quicker, blocks, _profile(traced, given, device)[0]))
            if rest is not None:
                rest(traced, output)
            return blocks
    finally:
        effects.restore()
        rewind.restore()


def _quicker(one: Block, other: Block) -> Block:
    return replace(one, forward=min(one.forward, other.forward), backward=min(one.backward, other.backward))


def _profile(
    traced: Traced, tensors: tuple[Tensor, ...], device: torch.device, *, first: bool = False, split: bool = False
) -> tuple[list[Block], Any]:
    """One pass, and its output; only the first looks at what is needed for a moment, which takes its time."""
    calls, values = traced.calls, {}
    (given,) = (node for node in traced.graph.nodes if node.op == "placeholder")
    values[given] = tensors
    passing = crossing(traced, range(1, len(calls) + 1))
    storages = SavedTensors(traced.root)
    storages.keep_only(tensors)
    last = {node: index for index, nodes in enumerate(passing) for node in nodes}
    names, blocks = names_of(traced), []
    for index, node in enumerate(calls):
        measured = _measure(node, traced, values, device, storages, first=first, split=split)
        values[node] = measured.pop("output")
        sent = storages.passing(tensor for value in passing[index] for tensor in _tensors(values[value]))
        name, named = names[index]
        blocks.append(Block(name=name, named=named, boundary=sum(sent.values()), passing=sent, **measured))
        for old in [old for old in values if last.get(old, -1) < index]:
            del values[old]
        storages.keep_only(_tensors(list(values.values())))
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    made = plain(fx.map_arg(output.args[0], values.__getitem__))
    return [replace(block, may_end=may) for block, may in zip(blocks, may_cut(traced), strict=True)], made


def _measure(
    node: fx.Node,
    traced: Traced,
    values: dict[fx.Node, Any],
    device: torch.device,
    storages: SavedTensors,
    *,
    first: bool,
    split: bool,
) -> dict[str, Any]:
    root = traced.root
    owner = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    parameters = [] if owner is None else list(owner.parameters())
    if node.op == "get_attr" and isinstance(held := _attribute(root, str(node.target)), nn.Parameter):
        parameters = [held]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    run = _Run(node, traced, values, trained, device)
    with placed(owner, device):
        run.once(storages)
        most = moment(run.again, [*_tensors(list(values.values())), *parameters]) if first else 0
        left = run.left() if split else 0
    made = _tensors(run.output)
    saved, saves = storages.add(run.seen, made)
    kept = {place: size for place, size in run.seen.items() if place not in run.taken}
    for tensor in made:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return {
        "forward": run.forward,
        "backward": run.backward,
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "trained": sum(parameter.nbytes for parameter in trained),
        "saved": saved,
        "saves": saves,
        "left": left,
        "transient": max(0, most - sum(kept.values())),
        "output": map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), run.output),
    }


class _Run:
    """Runs one call and its backward.

    Attributes:
        forward, backward: Seconds.
        seen: The places of what the last forward saved, and their bytes.
        taken: The places of what it was called with.
        output: What it returned.
    """

    def __init__(
        self,
        node: fx.Node,
        traced: Traced,
        values: dict[fx.Node, Any],
        trained: Sequence[nn.Parameter],
        device: torch.device,
    ) -> None:
        self.node, self.traced, self.values, self.trained, self.device = node, traced, values, trained, device
        self.forward = self.backward = 0.0
        self.seen: dict[int, int] = {}
        self.taken: set[int] = set()
        self.output: Any = None

    def once(self, storages: SavedTensors) -> None:
        """Measures it."""
        self.output, self.seen = None, {}
        args, kwargs, inputs = self._arguments()
        given = _tensors((args, kwargs))
        before, self.taken = versions(given), {tensor.untyped_storage().data_ptr() for tensor in given}
        begin = now(self.device)
        with storages.watch(self.seen):
            self.output = _call(self.node, self.traced.root, args, kwargs, self.device)
        self.forward = now(self.device) - begin
        if versions(given) != before:
            self.traced.writing.add(self.node)
        self.backward = self._go_back(inputs)

    def again(self) -> None:
        """Runs it without keeping anything."""
        args, kwargs, inputs = self._arguments()
        kept, self.output = self.output, _call(self.node, self.traced.root, args, kwargs, self.device)
        self._go_back(inputs)
        self.output = kept

    def left(self) -> int:
        """What the first part of a backward leaves for the second, beside what is saved."""
        args, kwargs, inputs = self._arguments()
        outputs = _tensors(_call(self.node, self.traced.root, args, kwargs, self.device))
        parts = SplitBackward(inputs, outputs)
        parts.of_inputs([torch.ones_like(output) if output.requires_grad else None for output in outputs])
        return parts.nbytes

    def _arguments(self) -> tuple[Any, Any, list[Tensor]]:
        inputs: list[Tensor] = []
        args, kwargs = fx.map_arg((self.node.args, self.node.kwargs), partial(_leaves, self.values, inputs))
        if self.node in self.traced.writing or _may_write(self.node, self.traced.root):
            args, kwargs = map_tensors(torch.clone, args), map_tensors(torch.clone, kwargs)
        return args, kwargs, inputs

    def _go_back(self, inputs: Sequence[Tensor]) -> float:
        """Returns the seconds; that gradients are added to those of earlier micro-batches is part of it."""
        outputs = [tensor for tensor in _tensors(self.output) if tensor.requires_grad]
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        if not outputs or not (leaves or self.trained):
            return 0.0
        ones = [torch.ones_like(tensor) for tensor in outputs]
        begin = now(self.device)
        found = torch.autograd.grad(outputs, [*leaves, *self.trained], ones, allow_unused=True)
        for gradient in found[len(leaves) :]:
            if gradient is not None and gradient.layout is torch.strided and gradient.is_contiguous():
                gradient.add_(gradient)
        return now(self.device) - begin


def _may_write(node: fx.Node, root: nn.Module) -> bool:
    """Whether a call may change its arguments; of layers that are not torch's own nobody knows before."""
    whole = node.op == "call_module" and not type(root.get_submodule(str(node.target))).__module__.startswith("torch.")
    return whole or writes_in_place(node, root)


def _leaves(values: dict[fx.Node, Any], inputs: list[Tensor], used: fx.Node) -> Any:
    """A value as leaves of autograd, which are noted."""

    def leaf(tensor: Tensor) -> Tensor:
        made = tensor.detach().requires_grad_(tensor.requires_grad)
        inputs.append(made)
        return made

    return map_tensors(leaf, values[used])


def _call(node: fx.Node, root: nn.Module, args: Any, kwargs: Any, device: torch.device) -> Any:
    if node.op == "call_module":
        return root.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "get_attr":
        held = _attribute(root, str(node.target))
        return held.detach().to(device).requires_grad_(held.requires_grad) if isinstance(held, Tensor) else held
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _attribute(root: nn.Module, name: str) -> Any:
    owner, _, own = name.rpartition(".")
    return getattr(root.get_submodule(owner), own)


@contextmanager
def placed(owner: nn.Module | None, device: torch.device) -> Iterator[None]:
    """A layer on the device, for a while."""
    with ExitStack() as stack:
        for tensor in () if owner is None else [*owner.parameters(), *owner.buffers()]:
            if tensor.device != device:
                stack.callback(move, tensor, tensor.device)
                move(tensor, device)
        yield


def now(device: torch.device) -> float:
    """The time in seconds, once a device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def compute_uncut(
    traced: Traced,
    tensors: Sequence[Tensor],
    device: torch.device,
    *,
    place_layer: Placed = placed,
    seen: Callable[[fx.Node, Any], None] | None = None,
) -> Any:
    """The output of a network that does not lie on any device yet: each layer is on one while it is called.

    Args:
        traced: Its forward.
        tensors: What it is called with.
        device: Where.
        place_layer: Makes a context in which a layer is there. Default: it is moved there and back.
        seen: Receives each call and its value. Default: nothing does.
    """
    calls = traced.calls
    (given,) = (node for node in traced.graph.nodes if node.op == "placeholder")
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    values: dict[fx.Node, Any] = {given: tuple(tensor.to(device) for tensor in tensors)}
    for node, needed in zip(calls, crossing(traced, range(1, len(calls) + 1)), strict=True):
        owner = traced.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        with place_layer(owner, device):
            values[node] = _call(node, traced.root, args, kwargs, device)
        if seen is not None:
            seen(node, values[node])
        values = {kept: values[kept] for kept in needed}
    return plain(fx.map_arg(output.args[0], values.__getitem__))


def used_tensors(traced: Traced) -> set[int]:
    """The parameters and buffers that a forward uses, by their ids."""
    targets = {str(node.target) for node in traced.calls if node.op == "call_module"}
    layers = [traced.root.get_submodule(target) for target in targets]
    held = [_attribute(traced.root, str(node.target)) for node in traced.graph.nodes if node.op == "get_attr"]
    return {id(tensor) for layer in layers for tensor in (*layer.parameters(), *layer.buffers())} | set(map(id, held))


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def merge_blocks(blocks: Sequence[Block], stages: int = 2) -> tuple[list[Block], list[int]]:
    """Puts calls together until each takes a noticeable part of the time, so that few places to cut are left.

    Where no module begins, only what takes such a part on both sides is kept apart.

    Args:
        blocks: One for each call.
        stages: How many stages there will be. Default: 2.

    Returns:
        The merged blocks, and for each the index of the call after its last.
    """
    whole = sum(block.forward + block.backward for block in blocks)
    merged: list[Block] = []
    ends: list[int] = []
    few, least = len(blocks) <= stages * _FINEST, whole / (stages * _FINEST)
    first, seconds = 0, 0.0
    for index, block in enumerate(blocks):
        seconds += block.forward + block.backward
        last = index == len(blocks) - 1
        after = block if last else blocks[index + 1]
        worth = after.named or min(seconds, after.forward + after.backward) >= least
        if last or (block.may_end and worth and (few or seconds >= least)):
            merged.append(_merged(blocks[first : index + 1]))
            ends.append(index + 1)
            first, seconds = index + 1, 0.0
    return merged, ends


def add_rest(blocks: Sequence[Block], rest: Block) -> list[Block]:
    """Counts what follows the network to its last block, which so takes longer and keeps more."""
    last = blocks[-1]
    merged = replace(_merged([last, rest]), boundary=last.boundary, passing=last.passing, may_end=last.may_end)
    return [*blocks[:-1], merged]


def _merged(blocks: Sequence[Block]) -> Block:
    return Block(
        name=blocks[0].name,
        named=blocks[0].named,
        forward=sum(block.forward for block in blocks),
        backward=sum(block.backward for block in blocks),
        parameters=sum(block.parameters for block in blocks),
        trained=sum(block.trained for block in blocks),
        saved=sum(block.saved for block in blocks),
        left=sum(block.left for block in blocks),
        saves=frozenset().union(*(block.saves for block in blocks)),
        boundary=blocks[-1].boundary,
        passing=blocks[-1].passing,
        transient=max(block.transient for block in blocks),
        may_end=blocks[-1].may_end,
    )
