"""Copies of batches for other places, whose tensors lie in memory as those of the originals do."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from equipoise.errors import StepError
from equipoise.extensions.virtual.parts.part_batches import Part
from equipoise.parallel.payload.shared_payload import dumps, loads
from equipoise.tree import extract_tensors, insert_tensors

__all__ = ["packed_parts", "unpacked_parts"]

# Bytes. Kernels round by how memory is aligned, so a copy of a batch is aligned as the batch is.
_ALIGNMENT = 64


class _Memory(NamedTuple):
    """A copy of memory in which tensors of a batch lie.

    Attributes:
        content: Its bytes, on the CPU; or a copy of a tensor that bytes alone do not describe.
        offset: Distance of the first byte from an aligned one; None for a copy of a tensor.
        places: The first element, dtype, shape and stride of each tensor, by its identity.
    """

    content: Tensor
    offset: int | None
    places: dict[int, Any]


def packed_parts(parts: dict[int, Part], purpose: str, remedy: str) -> bytes:
    """Return parts, by their numbers, as bytes.

    Args:
        parts: The parts.
        purpose: Sentence that says why batches are sent, for an error.
        remedy: A way to avoid this, as the end of a sentence.

    Raises:
        StepError: If a batch cannot be pickled.
    """
    content = {}
    for number, part in parts.items():
        structure, tensors = extract_tensors(part.batch)
        identities = [id(tensor) for tensor in tensors]
        memories = _memories_of(tensors)
        content[number] = (part._replace(batch=structure), identities, memories)
    try:
        return dumps(content)
    except Exception as error:
        raise StepError(
            f"{purpose} This one cannot be pickled: {error} Return tensors and plain containers, or {remedy}."
        ) from error


def _memories_of(tensors: Sequence[Tensor]) -> list[_Memory]:
    """Return the memories of tensors. Those that overlap have one, so that a change in place changes all of them."""
    plain = []
    memories = []
    for tensor in tensors:
        is_strided = type(tensor) is Tensor and tensor.layout is torch.strided
        is_marked = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
        if is_strided and not is_marked and tensor.numel():
            plain.append(tensor)
        else:
            copied = tensor.detach().to("cpu", copy=True)
            memory = _Memory(copied, None, {id(tensor): None})
            memories.append(memory)
    # In the order of their places, those that overlap follow each other.
    groups: list[list[Tensor]] = []
    storage: Any = None
    end = 0
    for tensor in sorted(plain, key=_span):
        storage_of_tensor, first, end_of_tensor = _span(tensor)
        if storage_of_tensor != storage or first >= end:
            groups.append([])
            end = 0
        groups[-1].append(tensor)
        storage = storage_of_tensor
        end = max(end, end_of_tensor)
    for group in groups:
        memory = _memory_of(group)
        memories.append(memory)
    return memories


def _span(tensor: Tensor) -> tuple[Any, int, int]:
    """Return the storage of a tensor, as it can be compared, the tensor's first byte in it, and the one after it."""
    length = 1
    for size, distance_in_memory in zip(tensor.shape, tensor.stride(), strict=True):
        length += (size - 1) * distance_in_memory
    storage = tensor.untyped_storage()
    identity = (
        str(tensor.device),
        storage.data_ptr(),
        len(storage),
    )
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    end = first + length * size
    return identity, first, end


def _memory_of(tensors: Sequence[Tensor]) -> _Memory:
    """Return the memory of tensors that overlap, of which the first one begins first."""
    first_tensor = tensors[0]
    _, first, end = _span(first_tensor)
    for tensor in tensors:
        _, _, end_of_tensor = _span(tensor)
        end = max(end, end_of_tensor)
    start = first // _ALIGNMENT * _ALIGNMENT
    storage = first_tensor.untyped_storage()
    content = torch.empty(0, dtype=torch.uint8, device=first_tensor.device)
    content.set_(storage, start, (end - start,), (1,))
    # An element begins at a multiple of its size.
    size = max(tensor.element_size() for tensor in tensors)
    offset = storage.data_ptr() % _ALIGNMENT // size * size
    places = {}
    for tensor in tensors:
        moved_by = (offset - start) // tensor.element_size()
        element = tensor.storage_offset() + moved_by
        shape = tuple(tensor.shape)
        places[id(tensor)] = (
            element,
            tensor.dtype,
            shape,
            tensor.stride(),
        )
    copied = content.to("cpu", copy=True)
    return _Memory(copied, offset, places)


def unpacked_parts(packed: bytes, devices: Sequence[torch.device]) -> dict[int, Part]:
    """Return parts whose tensors lie in memory as those that were packed.

    Args:
        packed: The parts.
        devices: The devices of this process.
    """
    parts = {}
    for number, (part, identities, memories) in loads(packed).items():
        device = devices[part.place]
        batch = move_data_to_device(part.batch, device)
        tensors: dict[int, Tensor] = {}
        for memory in memories:
            tensors |= _laid_out(memory, device)
        in_order = [tensors[identity] for identity in identities]
        batch = insert_tensors(batch, in_order)
        parts[number] = part._replace(batch=batch)
    return parts


def _laid_out(memory: _Memory, device: torch.device) -> dict[int, Tensor]:
    """Return the tensors of a memory on a device, by the identity of those that were packed."""
    content, offset, places = memory
    if offset is None:
        return dict.fromkeys(places, content.to(device))
    fresh = torch.empty(offset + len(content), dtype=torch.uint8, device=device)
    fresh[offset:] = content
    storage = fresh.untyped_storage()
    tensors = {}
    for identity, (element, dtype, shape, stride) in places.items():
        tensor = torch.empty(0, dtype=dtype, device=device)
        tensor.set_(storage, element, shape, stride)
        tensors[identity] = tensor
    return tensors
