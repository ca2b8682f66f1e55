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
        # What the parts of this process have computed in a step that is verified; None in others.
        self._originals: dict[int, Digests] | None = None

    def _run_parts(
        self, step: TrainingStep, parts: Sequence[Part], parameters: Sequence[nn.Parameter], buffers: Buffers
    ) -> Any:
        """Compute the parts of this process, and verify them; see `PartSteps`.

        Raises:
            StepError: In all processes, if a part has other results in another place.
        """
        is_verified = self._steps % self._every == 0
        self._steps += 1
        if not is_verified:
            return super()._run_parts(step, parts, parameters, buffers)
        # Before steps change their batches.
        packed = _packed(dict(enumerate(parts, self._first)))
        originals: dict[int, Digests] = {}
        self._originals = originals
        try:
            outcome = super()._run_parts(step, parts, parameters, buffers)
        finally:
            self._originals = None
        self._verify(step, self._processes.gather_objects(packed), originals, parameters, buffers)
        return outcome

    def _compute(self, step: TrainingStep, number: int, *arguments: Any, **options: Any) -> Any:
        """Compute a part, and note digests of its results; see `PartSteps`."""
        computed = super()._compute(step, number, *arguments, **options)
        if self._originals is not None:
            result, _, gradients = computed
            self._originals[number] = digests_of(self._results(result, gradients))
        return computed

    def _results(self, result: StepResult, gradients: Gradients) -> dict[str, Tensor | None]:
        """Return the results of a part, by what they are."""
        names = [name for name, parameter in self._module.named_parameters() if parameter.requires_grad]
        weight = torch.tensor(result.weight, dtype=torch.float64)
        return {
            "the loss": result.loss,
            "the weight of the loss": weight,
            **{f"the gradient of {name!r}": gradient for name, gradient in zip(names, gradients, strict=True)},
            **{f"the buffer {name!r}": buffer for name, buffer in self._module.named_buffers()},
        }

    def _verify(self, step: TrainingStep, packed: Sequence[bytes], originals: dict[int, Digests], *state: Any) -> None:
        """Compute the parts of the next process, and compare those of all.

        Args:
            step: The user's training step.
            packed: The parts of each process, by rank.
            originals: What the parts of this process have computed.
            state: The parameters with gradients, and the buffers at the step's beginning.
        """
        processes = self._processes
        received = _unpacked(packed[(processes.rank + 1) % processes.world_size], self._device)
        repeats = {number: self._repeats(step, number, [part], *state)[0].digests for number, part in received.items()}
        gathered = processes.gather_objects((originals, repeats))
        first = {number: digests for of_process, _ in gathered for number, digests in of_process.items()}
        second = {number: digests for _, of_process in gathered for number, digests in of_process.items()}
        for number in sorted(first):
            if first[number] != second[number]:
                different = [name for name in first[number] if first[number][name] != second[number][name]]
                self._refuse(step, number, packed, different, *state)

    def _repeats(
        self,
        step: TrainingStep,
        number: int,
        copies: Sequence[Part],
        parameters: Sequence[nn.Parameter],
        buffers: Buffers,
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
                tensors = {name: _on_cpu(results[name]) for name in shown}
                repeats.append(_Repeat(digests_of(results), tensors, events))
        window.load_state_dict(sums)
        return repeats

    def _refuse(
        self, step: TrainingStep, number: int, packed: Sequence[bytes], different: Sequence[str], *state: Any
    ) -> None:
        """Compute a part twice more in both places, and raise the error that says where it differs."""
        # 1. Of all gradients, and of all buffers, the first that differs.
        shown = list({name.partition("'")[0]: name for name in reversed(different)}.values())[::-1]

        # 2. Both places; a single process is both.
        processes = self._processes
        rank = next(rank for rank, (_, end) in enumerate(self._ranges) if number < end)
        other = (rank - 1) % processes.world_size
        repeats: list[_Repeat] = []
        if processes.rank in (rank, other):
            copies = [_unpacked(packed[rank], self._device)[number] for _ in range(2)]
            repeats = self._repeats(step, number, copies, *state, shown=shown)
        gathered = processes.gather_objects(repeats)

        # 3. Whether one place is enough for another result.
        pairs = {f"twice in process {place}": gathered[place] for place in (rank, other)}
        if rank != other:
            pairs[f"in process {rank} and in process {other}"] = [gathered[rank][0], gathered[other][0]]
        unlike = [places for places, (one, another) in pairs.items() if one.digests != another.digests]
        places = [*unlike, *reversed(pairs)][0]
        one, another = pairs[places]
        amounts = [f"{name} ({distance(one.shown[name], another.shown[name])})" for name in shown]
        raise StepError(
            f"Part {number} of batch {step.batch_idx} of epoch {self._epoch()}, all counted from 0, has other bits when"
            f" it is computed {places}: {', '.join(amounts)}. {first_difference(one.events, another.events)} {_ADVICE}"
        )


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", copy=True)


# Copies of batches


def _packed(parts: dict[int, Part]) -> bytes:
    """Return parts, by their numbers, as bytes.

    Raises:
        StepError: If a batch cannot be pickled.
    """
    content = {}
    for number, part in parts.items():
        structure, tensors = extract_tensors(part.batch)
        content[number] = (part._replace(batch=structure), [_memory_of(tensor) for tensor in tensors])
    try:
        return dumps(content)
    except Exception as error:
        raise StepError(
            f"VirtualDevicesStrategy(verify=...) sends batches to other places, and this one cannot be pickled."
            f" {error} Return tensors and plain containers, or leave `verify` out."
        ) from error


def _memory_of(tensor: Tensor) -> tuple[Tensor, Any]:
    """Return the memory of a tensor, on the CPU, and how it lies there; None where a copy is enough."""
    tensor = tensor.detach()
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    if not is_plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return tensor.to("cpu", copy=True), None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((last + 1,), (1,)).to("cpu", copy=True)
    offset = tensor.data_ptr() % _ALIGNMENT // tensor.element_size()
    return memory, (offset, tuple(tensor.shape), tensor.stride())


def _unpacked(packed: bytes, device: torch.device) -> dict[int, Part]:
    """Return parts on a device, whose tensors lie in memory as those that were packed."""
    parts = {}
    for number, (part, memories) in loads(packed).items():
        batch = move_data_to_device(part.batch, device)
        tensors = [_laid_out(*memory, device=device) for memory in memories]
        parts[number] = part._replace(batch=insert_tensors(batch, tensors))
    return parts


def _laid_out(memory: Tensor, layout: Any, device: torch.device) -> Tensor:
    if layout is None:
        return memory.to(device)
    offset, shape, stride = layout
    fresh = torch.empty(offset + len(memory), dtype=memory.dtype, device=device)
    fresh[offset:] = memory
    return torch.empty(0, dtype=memory.dtype, device=device).set_(fresh.untyped_storage(), offset, shape, stride)
