"""Batches copied to their device, in turn or by prefetch: the next one travels while the device computes a step.

The host is ahead of a CUDA device: it has started a step long before the device has done it, and reads the next batch
meanwhile. On a stream of its own the copy of that batch begins immediately. Nothing else moves: hooks, random numbers,
checkpoints and repeated steps see what they see without it.
"""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from equipoise.memory.out_of_memory import is_out_of_memory
from equipoise.notices import rank_zero_warn
from equipoise.to_device import copy_batch, to_device
from equipoise.trainer.settings.step_choices import PrefetchChoice

__all__ = ["Prefetch"]

# Bytes of a batch. CUDA puts smaller ones into the queue of the device with their values, and does not wait.
_LEAST_BYTES = 1 << 16
# The same in pinned memory, whose copy never waits: a smaller one takes the device less time than a second stream takes
# the host. An estimate.
_LEAST_PINNED_BYTES = 1 << 20
# Exact types, since a subclass may do anything when it is made. First, what is in most batches.
_VALUES = frozenset({str, int, float, bool, type(None), bytes, torch.Size})
_PLAIN = frozenset({tuple, list, dict})
_MAPPINGS = frozenset({OrderedDict, UserDict, defaultdict})


class Prefetch:
    """Copies the batches of a run beside the computation, where that is possible.

    Args:
        choice: True; "auto": batches of at least 64 KiB, or 1 MiB if all of it is pinned.

    Example:
        >>> batch = (torch.ones(2), "a name")
        >>> copy = Prefetch("auto").copier([torch.device("cpu")])
        >>> copy(batch, torch.device("cpu")) == batch
        True
    """

    def __init__(self, choice: PrefetchChoice) -> None:
        self._choice = choice
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # Reasons that the user knows: a run binds its copies once for each epoch and loader.
        self._reported: set[str] = set()

    def copier(
        self, devices: Sequence[torch.device], *, user_copies: bool = False
    ) -> Callable[[Any, torch.device], Any]:
        """Return the function that copies a batch to a device.

        Args:
            devices: The devices of the run.
            user_copies: Whether a hook of the user's copies batches instead. Default: False.
        """
        if all(device.type != "cuda" for device in devices):
            self._report("batches are copied beside the computation on CUDA devices alone")
            return copy_batch
        if user_copies:
            self._report("`transfer_batch_to_device` is overridden, so the copy is the user's own")
            return copy_batch
        return self._copy

    def _copy(self, batch: Any, device: torch.device) -> Any:
        """Copy a batch beside the computation, or in turn where it cannot be done otherwise."""
        if device.type != "cuda":
            return copy_batch(batch, device)
        # 1. Batches of which only their own classes know how they are copied.
        tensors: list[Tensor] = []
        foreign = _collect(batch, tensors)
        if foreign is not None:
            name = f"{foreign.__module__}.{foreign.__qualname__}"
            self._report(f"the copy of a {name} in a batch is a matter of its class")
            return copy_batch(batch, device)
        # 2. Batches that gain nothing.
        if not self._gains(tensors):
            return copy_batch(batch, device)
        # 3. All others. A tensor that occurs twice has two copies, as it has without prefetch.
        copies = self._copies(tensors, device)
        if copies is None:
            return copy_batch(batch, device)
        return _with_copies(batch, iter(copies), device)

    def _gains(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if a stream of its own is worth its time for these tensors."""
        if self._choice is True:
            return bool(tensors)
        least = _LEAST_BYTES
        if all(tensor.is_pinned() for tensor in tensors):
            least = _LEAST_PINNED_BYTES
        return sum(tensor.nbytes for tensor in tensors) >= least

    def _copies(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor] | None:
        """Return copies of tensors; None if only the memory of the computation can hold them."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        try:
            return _copied(tensors, device, stream)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # The host may have no memory that can be pinned. Or memory suffices that the stream of the computation has
            # freed, which no other stream can have.
            return None

    def _report(self, reason: str) -> None:
        """Tell the user once in a run why batches are not prefetched."""
        if reason in self._reported:
            return
        self._reported.add(reason)
        if self._choice is True:
            rank_zero_warn(f"prefetch=True has no effect here: {reason}.")
        else:
            rank_zero_info(f"prefetch is off: {reason}.")


def _collect(value: Any, tensors: list[Tensor]) -> type | None:
    """Append the tensors that may be copied, in order; return the first type whose copy is a matter of its own."""
    kind = type(value)
    if kind in _VALUES or isinstance(value, Tensor):
        if _may_be_copied(value):
            tensors.append(value)
        return None
    items = _items_of(value)
    if kind not in _PLAIN and callable(getattr(kind, "to", None)):
        return kind
    if items is None:
        # Lightning goes into these, too, and calls their classes. A text is a sequence of texts.
        is_foreign = isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes))
        if is_foreign:
            return kind
        return None
    for item in items:
        foreign = _collect(item, tensors)
        if foreign is not None:
            return foreign
    return None


def _with_copies(value: Any, copies: Iterator[Tensor], device: torch.device) -> Any:
    """Return a batch with copies in place of the tensors that `_collect` has appended."""
    kind = type(value)
    if kind in _VALUES:
        return value
    if isinstance(value, Tensor):
        if _may_be_copied(value):
            return next(copies)
        return to_device(value, device)
    items = _items_of(value)
    if items is None:
        return value
    if kind not in _PLAIN and not _is_named_tuple(kind):
        return apply_to_collection(value, Tensor, lambda tensor: _with_copies(tensor, copies, device))
    values = [_with_copies(item, copies, device) for item in items]
    if kind is dict:
        return dict(zip(value, values, strict=True))
    if kind is list:
        return values
    if kind is tuple:
        return tuple(values)
    # A named tuple takes its fields as arguments.
    return kind(*values)


def _items_of(value: Any) -> Any:
    """Return the items of a container that can be made again without code of its class; None for anything else."""
    kind = type(value)
    if kind is dict or kind in _MAPPINGS:
        return value.values()
    if kind in _PLAIN or _is_named_tuple(kind):
        return value
    if is_dataclass(kind):
        # Lightning copies the others with the object, as they are.
        return [getattr(value, field.name) for field in fields(kind) if field.init]
    return None


def _is_named_tuple(kind: type) -> bool:
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields")


def _may_be_copied(tensor: Tensor) -> bool:
    """Return True for a plain tensor of the host, whose copy has no graph and no class of its own."""
    if type(tensor) is not Tensor or not tensor.is_cpu:
        return False
    # The backward of a copy would run on the stream of the copy.
    return tensor.layout is torch.strided and not tensor.requires_grad


def _copied(tensors: Sequence[Tensor], device: torch.device, stream: torch.cuda.Stream) -> list[Tensor]:
    """Return copies of tensors of the host, for which the current stream of the device waits, and the host does not.

    A copy on the stream of the computation begins when all work before it is done. On another stream it begins at once,
    while the device still computes the last step.
    """
    # 1. Begin the copies. Pinned memory is kept until its copy is done, by torch's allocator.
    with torch.cuda.stream(stream):
        copies = [to_device(_pinned(tensor), device) for tensor in tensors]
    # 2. What the device computes from now on comes after them.
    current = torch.cuda.current_stream(device)
    current.wait_stream(stream)
    # 3. Their memory belongs to this stream, which may take it back when the computation, too, has done with it.
    for copy in copies:
        copy.record_stream(current)
    return copies


def _pinned(tensor: Tensor) -> Tensor:
    """Return a tensor in pinned memory, with the same strides; the tensor itself where that is not possible."""
    # Pinned memory has the strides of the tensor, so none of its values may lie at several places.
    is_dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    if not is_dense or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()
