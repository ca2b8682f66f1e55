"""A proof in the run: parts of a step are computed once more in another place, and compared bit for bit.

Each process computes the parts of the next one, too; a single process computes its own once more. Digests are
exchanged. Where they differ, both places compute the part again with hooks on all modules, to say where it begins.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.virtual.gradient_tree import Gradients
from equipoise.extensions.virtual.part_batches import Part
from equipoise.extensions.virtual.part_digests import Digests, Event, digests_of, distance, first_difference, watched
from equipoise.extensions.virtual.part_steps import PartSteps
from equipoise.parallel.payload.shared_payload import dumps, loads
from equipoise.parallel.snapshot.buffers import Buffers
from equipoise.parallel.snapshot.preserve_state import preserve_state
from equipoise.parallel.step_protocols import StepResult, TrainingStep
from equipoise.tree import extract_tensors, insert_tensors

__all__ = ["VerifiedSteps"]

# Bytes. Kernels round by how memory is aligned, so a copy of a batch is aligned as the batch is.
_ALIGNMENT = 64
_ADVICE = (
    "For the same bits set Trainer(deterministic=True), which calls torch.use_deterministic_algorithms, and"
    " CUBLAS_WORKSPACE_CONFIG=:4096:8; TF32 on or off everywhere, as many threads of CPUs everywhere, and devices of"
    " one kind. Draw from the global generators, and keep state in buffers. verify=0 computes nothing twice."
)


class _Repeat(NamedTuple):
    """What a part has computed once more.

    Attributes:
        digests: The digests.
        shown: The tensors that were asked for, on the CPU.
        events: What was between modules.
    """

    digests: Digests
    shown: dict[str, Tensor | None]
    events: list[Event]


class VerifiedSteps(PartSteps):
    """Parts as `PartSteps` computes them, and in every few steps once more in another place.

    Args:
        every: From one verified step to the next; the first step of a run is verified.
        arguments: See `PartSteps`.
    """

    def __init__(self, every: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._every = every
        self._steps = 0
        # Names of the parameters with gradients at the beginning of a step that is verified.
        self._trained: list[str] = []
        # What the parts of this process have computed in a step that is verified; None in others.
        self._originals: dict[int, Digests] | None = None

    def _run_parts(
        self,
        step: TrainingStep,
        parts: Sequence[Part],
        parameters: Sequence[nn.Parameter],
        buffers: Buffers,
    ) -> Any:
        """Compute the parts of this process, and verify them; see `PartSteps`.

        Raises:
            StepError: In all processes, if a part has other results in another place.
        """
        is_verified = self._steps % self._every == 0
        self._steps += 1
        if not is_verified:
            return super()._run_parts(step, parts, parameters, buffers)
        # Before steps freeze parameters, or change their batches.
        self._trained = [name for name, parameter in self._module.named_parameters() if parameter.requires_grad]
        numbered = dict(enumerate(parts, self._first))
        packed = _packed(numbered)
        originals: dict[int, Digests] = {}
        self._originals = originals
        try:
            outcome = super()._run_parts(step, parts, parameters, buffers)
        finally:
            self._originals = None
        of_all = self._processes.gather_objects(packed)
        self._verify(step, of_all, originals, parameters, buffers)
        return outcome

    def _compute(self, step: TrainingStep, number: int, *arguments: Any, **options: Any) -> Any:
        """Compute a part, and note digests of its results; see `PartSteps`."""
        computed = super()._compute(step, number, *arguments, **options)
        if self._originals is not None:
            result, _, gradients = computed
            results = self._results(result, gradients)
            self._originals[number] = digests_of(results)
        return computed

    def _results(self, result: StepResult, gradients: Gradients) -> dict[str, Tensor | None]:
        """Return the results of a part, by what they are."""
        results = {
            "the loss": result.loss,
            "the weight of the loss": torch.tensor(result.weight, dtype=torch.float64),
        }
        for name, gradient in zip(self._trained, gradients, strict=True):
            results[f"the gradient of {name!r}"] = gradient
        for name, buffer in self._module.named_buffers():
            results[f"the buffer {name!r}"] = buffer
        return results

    def _verify(
        self,
        step: TrainingStep,
        packed: Sequence[bytes],
        originals: dict[int, Digests],
        *state: Any,
    ) -> None:
        """Compute the parts of the next process, and compare those of all.

        Args:
            step: The user's training step.
            packed: The parts of each process, by rank.
            originals: What the parts of this process have computed.
            state: The parameters with gradients, and the buffers at the step's beginning.
        """
        # 1. The parts of the next process.
        processes = self._processes
        next_rank = (processes.rank + 1) % processes.world_size
        received = _unpacked(packed[next_rank], self._device)
        repeats = {}
        for number, part in received.items():
            (repeat,) = self._repeats(step, number, [part], *state)
            repeats[number] = repeat.digests

        # 2. What all processes have computed, in both places.
        first: dict[int, Digests] = {}
        second: dict[int, Digests] = {}
        for of_process, repeats_of_process in processes.gather_objects((originals, repeats)):
            first |= of_process
            second |= repeats_of_process

        # 3. The first part that differs.
        for number in sorted(first):
            different = [name for name, digest in first[number].items() if digest != second[number][name]]
            if different:
                self._refuse(step, number, packed, different, *state)

    def _repeats(
        self,
        step: TrainingStep,
        number: int,
        copies: Sequence[Part],
        parameters: Sequence[nn.Parameter],
        buffers: Buffers,
        *,
        shown: Sequence[str] = (),
    ) -> list[_Repeat]:
        """Compute a part once more, as often as there are copies of it, and restore at the end all that this changes.

        Args:
            step: The user's training step.
            number: The number of the part.
            copies: The part.
            parameters: The parameters with gradients.
            buffers: The buffers at the step's beginning.
            shown: Names of results that are returned as tensors, beside the events. Default: digests alone.
        """
        window = step.window
        assert window is not None
        sums = window.state_dict()
        repeats = []
        with preserve_state(self._module, containers=True):
            for part in copies:
                buffers.restore()
                with watched(self._module, is_on=bool(shown)) as events:
                    result, _, gradients = super()._compute(step, number, part, parameters, is_first=False)
                results = self._results(result, gradients)
                copied = {}
                for name in shown:
                    tensor = results[name]
                    copied[name] = None if tensor is None else tensor.detach().to("cpu", copy=True)
                repeat = _Repeat(digests_of(results), copied, events)
                repeats.append(repeat)
        window.load_state_dict(sums)
        return repeats

    def _refuse(
        self,
        step: TrainingStep,
        number: int,
        packed: Sequence[bytes],
        different: Sequence[str],
        *state: Any,
    ) -> None:
        """Compute a part twice more in both places, and raise the error that says where it differs."""
        # 1. Both places; a single process is both.
        processes = self._processes
        rank = 0
        while number >= self._ranges[rank][1]:
            rank += 1
        other_rank = (rank - 1) % processes.world_size
        shown = _first_of_each_kind(different)
        repeats: list[_Repeat] = []
        if processes.rank in (rank, other_rank):
            copies = []
            for _ in range(2):
                parts = _unpacked(packed[rank], self._device)
                copies.append(parts[number])
            repeats = self._repeats(step, number, copies, *state, shown=shown)
        gathered = processes.gather_objects(repeats)

        # 2. One that differs from itself is named first.
        pairs = {
            f"twice in process {rank}": gathered[rank],
            f"twice in process {other_rank}": gathered[other_rank],
        }
        if rank != other_rank:
            across = [gathered[rank][0], gathered[other_rank][0]]
            pairs[f"in process {rank} and in process {other_rank}"] = across
        places = ""
        for key in reversed(pairs):
            one, other = pairs[key]
            if one.digests != other.digests or not places:
                places = key
        one, other = pairs[places]

        # 3. The error.
        amounts = []
        for name in shown:
            amount = distance(one.shown[name], other.shown[name])
            amounts.append(f"{name} ({amount})")
        place = first_difference(one.events, other.events)
        raise StepError(
            f"Part {number} of batch {step.batch_idx} of epoch {self._epoch()}, all counted from 0, has other bits when"
            f" it is computed {places}: {', '.join(amounts)}. {place} {_ADVICE}"
        )


def _first_of_each_kind(different: Sequence[str]) -> list[str]:
    """Return the first gradient and the first buffer among results, and those of which there is one."""
    firsts: dict[str, str] = {}
    for name in different:
        kind, _, _ = name.partition("'")
        firsts.setdefault(kind, name)
    return list(firsts.values())


# Copies of batches


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


def _packed(parts: dict[int, Part]) -> bytes:
    """Return parts, by their numbers, as bytes.

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
            f"VirtualDevicesStrategy(verify=...) sends batches to other places, and this one cannot be pickled."
            f" {error} Return tensors and plain containers, or leave `verify` out."
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


def _unpacked(packed: bytes, device: torch.device) -> dict[int, Part]:
    """Return parts on a device, whose tensors lie in memory as those that were packed."""
    parts = {}
    for number, (part, identities, memories) in loads(packed).items():
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
    tensors = {}
    for identity, (element, dtype, shape, stride) in places.items():
        tensor = torch.empty(0, dtype=dtype, device=device)
        tensors[identity] = tensor.set_(fresh.untyped_storage(), element, shape, stride)
    return tensors
