"""A proof in the run: parts of a step are computed once more in another place, and compared bit for bit.

Each process computes the parts of the next one, too. A single process computes its own once more, those of each device
on the next one. Digests are exchanged. Where they differ, both places compute the part again with hooks on all modules,
to say where it begins.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.virtual.parts.gradient_tree import Gradients
from equipoise.extensions.virtual.parts.part_attributes import PartAttributes
from equipoise.extensions.virtual.parts.part_batches import Part
from equipoise.extensions.virtual.parts.part_steps import PartSteps
from equipoise.extensions.virtual.verification.batch_copies import packed_parts, unpacked_parts
from equipoise.extensions.virtual.verification.part_digests import (
    Digests,
    Event,
    digests_of,
    distance,
    first_difference,
    watched,
)
from equipoise.parallel.snapshot.buffers import Buffers
from equipoise.parallel.snapshot.preserve_state import preserve_state
from equipoise.parallel.step_protocols import StepResult, TrainingStep

__all__ = ["VerifiedSteps"]

_ADVICE = (
    "For the same bits set Trainer(deterministic=True), which calls torch.use_deterministic_algorithms, and"
    " CUBLAS_WORKSPACE_CONFIG=:4096:8; TF32 on or off everywhere, as many threads of CPUs everywhere, and devices of"
    " one kind. Draw from the global generators, and keep state in buffers. verify=0 computes nothing twice."
)

_PURPOSE = "VirtualDevicesStrategy(verify=...) sends batches to other places."


class _Repeat(NamedTuple):
    """Results of a part that was computed once more.

    Attributes:
        digests: The digests.
        shown: The tensors that were asked for, on the CPU.
        events: Events between modules.
        place: Name of the process or of the device that has computed it.
    """

    digests: Digests
    shown: dict[str, Tensor | None]
    events: list[Event]
    place: str


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
        attributes: PartAttributes,
    ) -> Any:
        """Compute the parts of this process, and verify them; see `PartSteps`.

        Raises:
            StepError: In all processes, if a part has other results in another place.
        """
        is_verified = self._steps % self._every == 0
        self._steps += 1
        if not is_verified:
            return super()._run_parts(step, parts, parameters, buffers, attributes)
        # Before steps freeze parameters, or change their batches.
        self._trained = [name for name, parameter in self._module.named_parameters() if parameter.requires_grad]
        numbered = dict(enumerate(parts, self._first))
        packed = packed_parts(numbered, _PURPOSE, "leave `verify` out")
        originals: dict[int, Digests] = {}
        self._originals = originals
        try:
            outcome = super()._run_parts(step, parts, parameters, buffers, attributes)
        finally:
            self._originals = None
        of_all = self._processes.gather_objects(packed)
        self._verify(step, of_all, originals, parameters, buffers)
        return outcome

    def _compute(self, step: TrainingStep, number: int, part: Part, *arguments: Any, **options: Any) -> Any:
        """Compute a part, and note digests of its results; see `PartSteps`."""
        computed = super()._compute(step, number, part, *arguments, **options)
        if self._originals is not None:
            result, _, gradients = computed
            results = self._results(result, gradients, part.place)
            self._originals[number] = digests_of(results)
        return computed

    def _results(self, result: StepResult, gradients: Gradients, place: int) -> dict[str, Tensor | None]:
        """Return the results of a part that a device has computed, by what they are."""
        results = {
            "the loss": result.loss,
            "the weight of the loss": torch.tensor(result.weight, dtype=torch.float64),
        }
        for name, gradient in zip(self._trained, gradients, strict=True):
            results[f"the gradient of {name!r}"] = gradient
        for name, buffer in self._modules.module_of(place).named_buffers():
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
            originals: The results of the parts of this process.
            state: The parameters with gradients, and the buffers at the step's beginning.
        """
        # 1. The parts of the next process.
        # In a ring: a single process is its own next one.
        processes = self._processes
        next_rank = (processes.rank + 1) % processes.world_size
        received = unpacked_parts(packed[next_rank], self._modules.devices, moved_by=1)
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
            different = []
            for name, digest in first[number].items():
                if digest != second[number][name]:
                    different.append(name)
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
        # The backward of a part adds its weight to the window's.
        window = step.window
        assert window is not None
        sums = window.state_dict()
        repeats = []
        with preserve_state(self._module, containers=True):
            for part in copies:
                buffers.restore()
                with watched(self._module, is_on=bool(shown)) as events:
                    result, _, gradients = super()._compute(step, number, part, parameters, is_first=False)
                results = self._results(result, gradients, part.place)
                if part.place:
                    # Metrics of a copy are as new for the next part; those of the module are restored below.
                    self._metrics.take(part.place)
                copied = {}
                for name in shown:
                    tensor = results[name]
                    copied[name] = None if tensor is None else tensor.detach().to("cpu", copy=True)
                digests = digests_of(results)
                place = self._place_name(part.place)
                repeat = _Repeat(digests, copied, events, place)
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
        # 1. Both places; a single process is both, with one device or two.
        processes = self._processes
        rank = 0
        while number >= self._ranges[rank][1]:
            rank += 1
        other_rank = (rank - 1) % processes.world_size
        shown = _first_of_each_kind(different)
        repeats: list[_Repeat] = []
        ranks = [rank, other_rank]
        for moved_by, rank_of_place in enumerate(ranks):
            if processes.rank == rank_of_place:
                copies = []
                for _ in range(2):
                    parts = unpacked_parts(packed[rank], self._modules.devices, moved_by=moved_by)
                    copies.append(parts[number])
                repeats += self._repeats(step, number, copies, *state, shown=shown)
        gathered = processes.gather_objects(repeats)
        first = gathered[rank][:2]
        second = gathered[other_rank][-2:]

        # 2. One that differs from itself is named first.
        place = first[0].place
        other_place = second[0].place
        pairs = {
            f"twice {place}": first,
            f"twice {other_place}": second,
        }
        if place != other_place:
            across = [first[0], second[0]]
            pairs[f"{place} and {other_place}"] = across
        # Those of both places come last, so they are looked at first.
        places = ""
        for key in reversed(pairs):
            one, other = pairs[key]
            differ = one.digests != other.digests
            if differ or not places:
                places = key
        one, other = pairs[places]

        # 3. The error.
        amounts = []
        for name in shown:
            amount = distance(one.shown[name], other.shown[name])
            amounts.append(f"{name} ({amount})")
        difference = first_difference(one.events, other.events)
        raise StepError(
            f"Part {number} of batch {step.batch_idx} of epoch {self._epoch()}, all counted from 0, has other bits when"
            f" it is computed {places}: {', '.join(amounts)}. {difference} {_ADVICE}"
        )

    def _place_name(self, place: int) -> str:
        """Return the name of this process, or of a device if there are several, as the end of a phrase."""
        devices = self._modules.devices
        if len(devices) == 1:
            return f"in process {self._processes.rank}"
        return f"on device {place} ({devices[place]})"


def _first_of_each_kind(different: Sequence[str]) -> list[str]:
    """Return the first gradient and the first buffer among results, and those of which there is one."""
    # "the gradient of 'net.0.weight'" is of the kind "the gradient of ".
    firsts: dict[str, str] = {}
    for name in different:
        kind, _, _ = name.partition("'")
        firsts.setdefault(kind, name)
    return list(firsts.values())
