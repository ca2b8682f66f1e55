"""What each call of a network takes: time forward and backward, activations, what passes on.

The whole network is gone through several times, and of each call the quickest counts: somebody else at work for a
moment, or memory that is touched for the first time, disturbs one pass and not all of them.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.parallel.partition import Block
from equipoise.parallel.rewind import Rewind
from equipoise.parallel.stages import crossing, map_tensors, may_cut, owners, with_parents
from equipoise.parallel.tracing import Traced, writes_in_place

__all__ = ["merge_blocks", "profile_calls"]

_LEAST, _MOST = 3, 8  # passes
_FINEST = 200  # a block takes at least such a part of an average stage, where it may be cut


def profile_calls(
    traced: Traced, module: nn.Module, tensors: Sequence[Tensor], device: torch.device, *, seconds: float = 3.0
) -> list[Block]:
    """Measures every call of a forward, one after the other, on a device; nothing is changed by it.

    Args:
        traced: The forward.
        module: The user's module, whose buffers and metrics are brought back.
        tensors: What it is called with; one micro-batch.
        device: Where. Parameters that lie elsewhere are there while their call is measured.
        seconds: No pass begins after so many, once there were three. Default: 3.

    Returns:
        A block for each call.
    """
    rewind = Rewind(module, [device])
    rewind.mark()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            given = tuple(tensor.detach().clone().to(device) for tensor in tensors)
            begin = time.perf_counter()
            blocks = _profile(traced, given, device)
            for count in range(1, _MOST):
                if count >= _LEAST and time.perf_counter() - begin > seconds:
                    break
                blocks = list(map(_quicker, blocks, _profile(traced, given, device)))
            return blocks
    finally:
        rewind.restore()


def _quicker(one: Block, other: Block) -> Block:
    return replace(one, forward=min(one.forward, other.forward), backward=min(one.backward, other.backward))


def _profile(traced: Traced, tensors: tuple[Tensor, ...], device: torch.device) -> list[Block]:
    calls, values = traced.calls, {}
    (given,) = (node for node in traced.graph.nodes if node.op == "placeholder")
    values[given] = tensors
    passing, cuts = crossing(traced, range(1, len(calls) + 1)), may_cut(traced)
    last = {node: index for index, nodes in enumerate(passing) for node in nodes}
    names, blocks = _names(traced), []
    for index, node in enumerate(calls):
        measured = _measure(node, traced.root, values, device)
        values[node] = measured.pop("output")
        boundary = sum(tensor.nbytes for value in passing[index] for tensor in _tensors(values[value]))
        name, named = names[index]
        blocks.append(Block(name=name, named=named, boundary=boundary, may_end=cuts[index], **measured))
        for old in [old for old in values if last.get(old, -1) < index]:
            del values[old]
    return blocks


def _measure(node: fx.Node, root: nn.Module, values: dict[fx.Node, Any], device: torch.device) -> dict[str, Any]:
    owner = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    parameters = [] if owner is None else list(owner.parameters())
    if node.op == "get_attr" and isinstance(held := _attribute(root, str(node.target)), nn.Parameter):
        parameters = [held]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    with _placed(owner, device):
        inputs: list[Tensor] = []
        args, kwargs = fx.map_arg((node.args, node.kwargs), partial(_leaves, values, inputs))
        if writes_in_place(node, root):
            args, kwargs = map_tensors(torch.clone, args), map_tensors(torch.clone, kwargs)
        seen: dict[int, int] = {}
        begin = _now(device)
        with torch.autograd.graph.saved_tensors_hooks(_counter(seen, parameters), lambda packed: packed):
            output = _call(node, root, args, kwargs)
        forward = _now(device) - begin
        backward = _go_back(output, inputs, trained, device)
    made = sum(tensor.nbytes for tensor in _tensors(output))
    return {
        "forward": forward,
        "backward": backward,
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "trained": sum(parameter.nbytes for parameter in trained),
        "saved": sum(seen.values()),
        "transient": 2 * made,
        "output": map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), output),
    }


def _go_back(output: Any, inputs: Sequence[Tensor], trained: Sequence[Tensor], device: torch.device) -> float:
    """The seconds of a backward; that gradients are added to those of earlier micro-batches is part of it."""
    outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    wanted = [*leaves, *trained] if outputs else []
    if not wanted:
        return 0.0
    ones = [torch.ones_like(tensor) for tensor in outputs]
    begin = _now(device)
    found = torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
    for gradient in found[len(leaves) :]:
        if gradient is not None:
            gradient.add_(gradient)
    return _now(device) - begin


def _leaves(values: dict[fx.Node, Any], inputs: list[Tensor], used: fx.Node) -> Any:
    """A value as leaves of autograd, which are noted."""

    def leaf(tensor: Tensor) -> Tensor:
        made = tensor.detach().requires_grad_(tensor.requires_grad)
        inputs.append(made)
        return made

    return map_tensors(leaf, values[used])


def _counter(seen: dict[int, int], parameters: Sequence[Tensor]) -> Any:
    """Notes the bytes that are saved for the backward, each storage once, parameters not."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            seen[place] = tensor.untyped_storage().nbytes()
        return tensor

    return pack


def _call(node: fx.Node, root: nn.Module, args: Any, kwargs: Any) -> Any:
    if node.op == "call_module":
        return root.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "get_attr":
        return _attribute(root, str(node.target))
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _attribute(root: nn.Module, name: str) -> Any:
    owner, _, own = name.rpartition(".")
    return getattr(root.get_submodule(owner), own)


@contextmanager
def _placed(owner: nn.Module | None, device: torch.device) -> Iterator[None]:
    """A layer on the device, for a while."""
    with ExitStack() as stack:
        if owner is not None and any(tensor.device != device for tensor in owner.parameters()):
            before = next(owner.parameters()).device
            stack.callback(owner.to, before)
            owner.to(device)
        yield


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def _names(traced: Traced) -> list[tuple[str, bool]]:
    """For each call a name by which `cut_by_names` finds it, and whether it is a module's.

    That is the outermost module that begins with it, such as "encoder.layers.7"; elsewhere that of the call itself.
    """
    seen: set[str] = set()
    answer = []
    for node, called in zip(traced.calls, owners(traced), strict=True):
        own = [parent for name in called for parent in with_parents(name)]
        new = [name for name in own if name not in seen]
        seen.update(new)
        answer.append((new[0], True) if new else (node.name, False))
    return answer


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


def _merged(blocks: Sequence[Block]) -> Block:
    return Block(
        name=blocks[0].name,
        named=blocks[0].named,
        forward=sum(block.forward for block in blocks),
        backward=sum(block.backward for block in blocks),
        parameters=sum(block.parameters for block in blocks),
        trained=sum(block.trained for block in blocks),
        saved=sum(block.saved for block in blocks),
        boundary=blocks[-1].boundary,
        transient=max(block.transient for block in blocks),
        may_end=blocks[-1].may_end,
    )
