"""What each call of a network takes: time forward and backward, activations, what passes on."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.parallel.internals import versions
from equipoise.parallel.partition import Block
from equipoise.parallel.rewind import Rewind
from equipoise.parallel.stages import crossing, map_tensors, may_cut
from equipoise.parallel.tracing import Surroundings, Traced, writes_in_place
from equipoise.strategies.pipeline_memory import Storages, moment
from equipoise.strategies.pipeline_placement import move

__all__ = ["merge_blocks", "profile_calls"]

_REPEATS = 3
_FINEST = 400  # a block takes at least such a part of the whole, where it may be cut


def profile_calls(
    traced: Traced, module: nn.Module, tensors: Sequence[Tensor], device: torch.device, *, repeats: int = _REPEATS
) -> list[Block]:
    """Measures every call of a forward, one after the other, on a device; nothing is changed by it.

    Args:
        traced: The forward.
        module: The user's module, whose buffers and metrics are brought back.
        tensors: What it is called with; one micro-batch.
        device: Where. Parameters that lie elsewhere are there while their call is measured.
        repeats: How often; the quickest counts. Default: 3.

    Returns:
        A block for each call.
    """
    rewind, surroundings = Rewind(module, [device]), Surroundings(module)
    rewind.mark()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            tensors = [tensor.detach().clone().to(device) for tensor in tensors]
            return _profile(traced, tuple(tensors), device, repeats)
    finally:
        surroundings.restore()
        rewind.restore()


def _profile(traced: Traced, tensors: tuple[Tensor, ...], device: torch.device, repeats: int) -> list[Block]:
    calls, values = traced.calls, {}
    (given,) = (node for node in traced.graph.nodes if node.op == "placeholder")
    values[given] = tensors
    passing = crossing(traced, range(1, len(calls) + 1))
    storages = Storages(traced.root)
    storages.keep_only(tensors)
    last = {node: index for index, nodes in enumerate(passing) for node in nodes}
    blocks = []
    for index, node in enumerate(calls):
        measured = _measure(node, traced, values, device, repeats, storages)
        values[node] = measured.pop("output")
        sent = storages.passing(tensor for value in passing[index] for tensor in _tensors(values[value]))
        blocks.append(Block(name=_name(node), boundary=sum(sent.values()), passing=sent, **measured))
        for old in [old for old in values if last.get(old, -1) < index]:
            del values[old]
        storages.keep_only(_tensors(list(values.values())))
    return [replace(block, may_end=may) for block, may in zip(blocks, may_cut(traced), strict=True)]


def _measure(
    node: fx.Node,
    traced: Traced,
    values: dict[fx.Node, Any],
    device: torch.device,
    repeats: int,
    storages: Storages,
) -> dict[str, Any]:
    root = traced.root
    owner = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    parameters = [] if owner is None else list(owner.parameters())
    if node.op == "get_attr" and isinstance(held := _attribute(root, str(node.target)), nn.Parameter):
        parameters = [held]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    run = _Run(node, traced, values, trained, device)
    with _placed(owner, device):
        for _ in range(repeats):
            run.once(storages)
        most = moment(run.again, [*_tensors(list(values.values())), *parameters])
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
        "transient": max(0, most - sum(kept.values())),
        "output": map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), run.output),
    }


class _Run:
    """Runs one call and its backward.

    Attributes:
        forward, backward: Seconds of the quickest.
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
        self.forward = self.backward = float("inf")
        self.seen: dict[int, int] = {}
        self.taken: set[int] = set()
        self.output: Any = None

    def once(self, storages: Storages) -> None:
        """Measures it."""
        self.output, self.seen = None, {}
        args, kwargs, inputs = self._arguments()
        given = _tensors((args, kwargs))
        before, self.taken = versions(given), {tensor.untyped_storage().data_ptr() for tensor in given}
        begin = _now(self.device)
        with storages.watch(self.seen):
            self.output = _call(self.node, self.traced.root, args, kwargs, self.device)
        self.forward = min(self.forward, _now(self.device) - begin)
        if versions(given) != before:
            self.traced.writing.add(self.node)
        begin = _now(self.device)
        self._go_back(inputs)
        self.backward = min(self.backward, _now(self.device) - begin)

    def again(self) -> None:
        """Runs it without keeping anything."""
        args, kwargs, inputs = self._arguments()
        kept, self.output = self.output, _call(self.node, self.traced.root, args, kwargs, self.device)
        self._go_back(inputs)
        self.output = kept

    def _arguments(self) -> tuple[Any, Any, list[Tensor]]:
        inputs: list[Tensor] = []
        args, kwargs = fx.map_arg((self.node.args, self.node.kwargs), partial(_leaves, self.values, inputs))
        if self.node in self.traced.writing or _may_write(self.node, self.traced.root):
            args, kwargs = map_tensors(torch.clone, args), map_tensors(torch.clone, kwargs)
        return args, kwargs, inputs

    def _go_back(self, inputs: Sequence[Tensor]) -> None:
        outputs = [tensor for tensor in _tensors(self.output) if tensor.requires_grad]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        if outputs and (wanted or self.trained):
            ones = [torch.ones_like(tensor) for tensor in outputs]
            torch.autograd.grad(outputs, [*wanted, *self.trained], ones, allow_unused=True)


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
def _placed(owner: nn.Module | None, device: torch.device) -> Iterator[None]:
    """A layer on the device, for a while."""
    with ExitStack() as stack:
        for tensor in () if owner is None else [*owner.parameters(), *owner.buffers()]:
            if tensor.device != device:
                stack.callback(move, tensor, tensor.device)
                move(tensor, device)
        yield


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("network.") if node.op in ("call_module", "get_attr") else node.name


def merge_blocks(blocks: Sequence[Block]) -> tuple[list[Block], list[int]]:
    """Puts calls together until each takes a noticeable part of the time, so that few places to cut are left.

    Args:
        blocks: One for each call.

    Returns:
        The merged blocks, and for each the index of the call after its last.
    """
    whole = sum(block.forward + block.backward for block in blocks)
    merged: list[Block] = []
    ends: list[int] = []
    first, seconds = 0, 0.0
    for index, block in enumerate(blocks):
        seconds += block.forward + block.backward
        last = index == len(blocks) - 1
        if last or (block.may_end and (seconds >= whole / _FINEST or len(blocks) <= _FINEST)):
            merged.append(_merged(blocks[first : index + 1]))
            ends.append(index + 1)
            first, seconds = index + 1, 0.0
    return merged, ends


def _merged(blocks: Sequence[Block]) -> Block:
    named = next((block.name for block in blocks if block.parameters), blocks[0].name)
    return Block(
        name=named,
        forward=sum(block.forward for block in blocks),
        backward=sum(block.backward for block in blocks),
        parameters=sum(block.parameters for block in blocks),
        trained=sum(block.trained for block in blocks),
        saved=sum(block.saved for block in blocks),
        saves=frozenset().union(*(block.saves for block in blocks)),
        boundary=blocks[-1].boundary,
        passing=blocks[-1].passing,
        transient=max(block.transient for block in blocks),
        may_end=blocks[-1].may_end,
    )
