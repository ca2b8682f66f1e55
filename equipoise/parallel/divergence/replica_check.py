"""ReplicaCheck: processes compare what they hold alike, and all of them end with one error where it differs.

    after the first step     digests of the parameters are computed on the device; where reading them would wait, the
    of a run                 next comparison reads them
    before a checkpoint      digests of the parameters
    at the end of an epoch   the same, and which buffers have changed since the run began

Bits are compared: exchanged gradients have the same in all processes, and so has what devices of one kind compute from
them. Devices of different kinds may round differently, so they are not compared with each other.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.divergence.differences import Digests, agree, differences, divergence_error, summary
from equipoise.parallel.divergence.digests import digests_of, has_digest
from equipoise.parallel.divergence.replicated import Replicated

__all__ = ["ReplicaCheck", "kind_of"]

# The part to which buffers belong, none of which is a part of a strategy.
_BUFFERS = "buffers"


class _Note(NamedTuple):
    """Digests that are not read yet.

    Attributes:
        step: The number of optimiser steps after which they were computed.
        keys: The part of the module and the name of each tensor.
        digests: The digest of each tensor.
    """

    step: int
    keys: list[tuple[str, str]]
    digests: Tensor

    def read(self) -> Digests:
        """Return the digests by name, once the device has computed them."""
        digests: Digests = {}
        values = self.digests.tolist()
        for (part, name), value in zip(self.keys, values, strict=True):
            digests.setdefault(part, {})[name] = value
        return digests


class _State(NamedTuple):
    """Digests to be compared.

    Attributes:
        digests: The digests of this process.
        agreed: The number of optimiser steps after which the processes agreed last.
        now: The number of optimiser steps after which they were computed.
    """

    digests: Digests
    agreed: int
    now: int


class ReplicaCheck:
    """Compares replicas between processes, all of which call each method together.

    Args:
        replicated: Returns the tensors that processes hold alike; see `Strategy.replicated_tensors`.
        processes: The processes.
        step: The number of optimiser steps before the run.
    """

    def __init__(self, replicated: Callable[[], Replicated], processes: Processes, step: int) -> None:
        self._replicated = replicated
        self._processes = processes
        self._agreed_step = step
        self._buffers_agreed_step = step
        # Computed and not compared yet.
        self._notes: list[_Note] = []
        self._first_buffers = self._digests_of_buffers()

    def note(self, step: int) -> None:
        """Compute digests of the parameters, which the next comparison reads. Nothing waits for a device.

        Args:
            step: The number of optimiser steps.
        """
        keys: list[tuple[str, str]] = []
        tensors: list[Tensor] = []
        replicated = self._replicated()
        for part, parameters in replicated.parameters.items():
            for name, tensor in parameters.items():
                if not has_digest(tensor):
                    continue
                keys.append((f"{part} on {kind_of(tensor.device)}", name))
                tensors.append(tensor)
        self._notes.append(_Note(step, keys, digests_of(tensors)))

    def compare_noted(self) -> None:
        """Compare what was noted, and wait for it.

        Raises:
            StepError: If it differs. Then every process raises.
        """
        states = self._read_notes()
        if states:
            self._compare(states)

    def compare(self, step: int, *, buffers: bool = False) -> None:
        """Compare the parameters, after those that were noted; see `compare_noted`.

        Args:
            step: The number of optimiser steps.
            buffers: Whether to compare which buffers have changed since the run began, once each process has trained on
                a batch. Default: False.
        """
        self.note(step)
        states = self._read_notes()
        if buffers and self._first_buffers:
            changes = self._changes_of_buffers()
            states.append(_State({_BUFFERS: changes}, self._buffers_agreed_step, step))
            self._buffers_agreed_step = step
        self._compare(states)

    def _read_notes(self) -> list[_State]:
        states = []
        for note in self._notes:
            states.append(_State(note.read(), self._agreed_step, note.step))
            self._agreed_step = note.step
        self._notes = []
        return states

    def _changes_of_buffers(self) -> dict[str, int]:
        """Return 1 for each buffer that has changed since the run began, else 0."""
        changes: dict[str, int] = {}
        buffers = self._digests_of_buffers()
        for key, digest in buffers.items():
            # A buffer that the run has added or enlarged counts as unchanged.
            first = self._first_buffers.get(key, digest)
            name, _ = key
            changes[f"the buffer {name}"] = int(digest != first)
        return changes

    def _digests_of_buffers(self) -> dict[tuple[str, torch.Size], int]:
        """Return the digest of each buffer by its name and shape."""
        keys = []
        buffers = []
        replicated = self._replicated()
        for name, buffer in replicated.buffers.items():
            if not has_digest(buffer):
                continue
            keys.append((name, buffer.shape))
            buffers.append(buffer)
        digests: list[int] = digests_of(buffers).tolist()
        return dict(zip(keys, digests, strict=True))

    def _compare(self, states: list[_State]) -> None:
        of_all = self._processes.gather_objects([summary(state.digests) for state in states])
        for number, state in enumerate(states):
            summaries = [of_rank[number] for of_rank in of_all]
            if agree(summaries):
                continue
            # All processes come here, since all have the same summaries.
            differing = list(differences(self._processes.gather_objects(state.digests)))
            raise divergence_error(differing, state.agreed, state.now)


def kind_of(device: torch.device) -> str:
    """Return the kind of a device of this process, as far as rounding depends on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        # Threads share out the elements of a tensor; the last ones of each share may be rounded differently.
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{capability} with {torch.get_num_threads()} threads"
    return device.type
