"""Meetings of the processes in a step by hand, where each tells the others what it is about to do.

Each backward, each step of an optimiser and each end of a `training_step` is an event. Each process announces its event
as one row of numbers on the host, and all wait for the rows of all:

    process 0   backward   backward   step   end
    process 1   backward   step       step   end
                           joins process 0, and announces its step again

What follows depends on the events:

    all at a backward     they exchange their gradients
    some at a backward    the others join them with the gradients that they have, and announce their event again
    none at a backward    they continue if their events are the same; if not, all raise one error

So a process that has no backward where others have one, or fewer of them, is no obstacle.

A step of an optimiser is no event if all processes have had a backward since the last one, and none has joined: what
each has stepped is part of its next event.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from equipoise.errors import StepError
from equipoise.parallel.communication.process_group import host_group
from equipoise.strategies.ddp.exchange.by_hand.means import Share

__all__ = ["Event", "Kind", "Meetings"]

# Rows of numbers, one for each process, and the exchange that fills them.
Announced = tuple[torch.Tensor, dist.Work]
# Stands in the history for the begin of a training step. The steps of optimisers have numbers from 0.
_BEGIN_OF_STEP = -1


class Kind(IntEnum):
    """Kinds of events."""

    BACKWARD = 0
    BACKWARD_WITH_GRAPH = 1
    GRAD = 2
    SECOND_BACKWARD = 3
    STEP = 4
    END = 5


_TEXTS = {
    Kind.BACKWARD: "runs a backward",
    Kind.BACKWARD_WITH_GRAPH: "runs a backward with create_graph=True",
    Kind.GRAD: "computes gradients by `torch.autograd.grad`",
    Kind.SECOND_BACKWARD: "runs a backward through gradients",
    Kind.STEP: "steps an optimiser",
    Kind.END: "has ended its `training_step`",
}


class Event(NamedTuple):
    """An event in one process. It is exchanged as a row of numbers.

    Attributes:
        kind: Its kind.
        history: A number that stands for the training step, and for the steps of optimisers so far.
        detail: What events of one kind that are alike have in common: the optimiser, or the parameters.
        weight: The number of samples of the step in this process.
        loss: The loss of an optimiser's closure; NaN where nothing reads it.
        compared: The number of tensors that the processes compare.
        total: Their sum.
        size: The sum of their absolute values.
    """

    kind: Kind
    history: float
    detail: float = 0
    weight: float = 1
    loss: float = 0
    compared: float = 0
    total: float = 0
    size: float = 0


class Meetings:
    """Lets the processes meet at their events. Callers leave it out while `are_paused`.

    Args:
        join: Exchanges the gradients of all processes, of which some are at a backward.

    Attributes:
        reference: The first weight of process 0, which stands for 1; None before the first meeting.
        has_joined: Whether a process had no backward where others had one, since the last step of an optimiser.
        needs_meeting: Whether a process may come to the next step of an optimiser while others are at a backward.
        are_paused: Whether no process waits for the others, since they do different things.
    """

    def __init__(self, join: Callable[[Share], None]) -> None:
        self._join = join
        self._rank = dist.get_rank()
        self._size = dist.get_world_size()
        self._history = 0
        self._weight = 1.0
        self._has_left_exchange = False
        self.reference: float | None = None
        self.has_joined = False
        self.needs_meeting = True
        self.are_paused = False

    def begin_step(self, weight: float) -> None:
        """Begin a training step with this number of samples."""
        self._add_to_history(_BEGIN_OF_STEP)
        self._weight = weight

    def _add_to_history(self, event: int) -> None:
        # A check sum of all events so far, which float64 holds exactly.
        self._history = zlib.crc32(event.to_bytes(4, "big", signed=True), self._history)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Meet nobody in a `with` block, such as a step of an evaluation, of which others have another number."""
        before = self.are_paused
        self.are_paused = True
        try:
            yield
        finally:
            self.are_paused = before

    def note_step(self, number: int) -> None:
        """Note the step of an optimiser, by its number, with gradients that all processes have alike."""
        self._add_to_history(number)
        self.needs_meeting = True
        self.has_joined = False

    def note_failure(self) -> None:
        """Note that this process has left an exchange in its midst, by an error that the user's code may catch."""
        self._has_left_exchange = True

    @property
    def factor(self) -> float:
        """The factor of the gradients of this process in their sum; after the first meeting."""
        assert self.reference is not None
        return self._weight / self.reference

    def announce(self, kind: Kind, **numbers: float) -> Announced:
        """Begin to exchange an event, without waiting for the others.

        Args:
            kind: Its kind.
            numbers: Other numbers of it, by the names of `Event`.

        Returns:
            What `exchange_gradients` takes.
        """
        if self._has_left_exchange:
            raise StepError("A backward has failed while its gradients were exchanged. Let its error end the training.")
        event = Event(kind=kind, history=self._history, weight=self._weight, **numbers)
        # A sum of rows, of which each process fills its own, is what a gathering is, in one small exchange.
        rows = torch.zeros(self._size, len(event), dtype=torch.float64)
        rows[self._rank] = torch.tensor(event, dtype=torch.float64)
        work = dist.all_reduce(rows, group=host_group(), async_op=True)
        assert work is not None
        return rows, work

    def _wait(self, announced: Announced) -> tuple[list[Event], Share]:
        """Return the events of all processes, by rank, and the share of this one in a mean by numbers of samples."""
        rows, work = announced
        work.wait()
        events = [Event(Kind(int(kind)), *numbers) for kind, *numbers in rows.tolist()]
        if self.reference is None:
            self.reference = events[0].weight or 1.0
        samples = sum(event.weight for event in events)
        if not samples:
            # All have equal parts.
            return events, Share(1.0, self._size)
        return events, Share(self.factor, samples / self.reference)

    def exchange_gradients(self, announced: Announced) -> None:
        """Exchange the gradients of a backward that was announced, and which some processes may not have."""
        events, share = self._wait(announced)
        self._exchange_gradients(events, share)

    def _exchange_gradients(self, events: list[Event], share: Share) -> None:
        if any(event.kind != Kind.BACKWARD for event in events):
            self.has_joined = True
        self.needs_meeting = self.has_joined
        self._join(share)
        # A process may be a step ahead. The exchange that it has begun ends first.
        histories = {event.history for event in events}
        if len(histories) > 1:
            raise _differences(events)

    def wait_for_all(self, kind: Kind, numbers: Callable[[], dict[str, float]] = dict) -> tuple[list[Event], Share]:
        """Wait until all processes are at an event of this kind, and join those that are at a backward until then.

        Args:
            kind: The kind of the event.
            numbers: Function that returns its other numbers. Gradients change them, so it is called again after each
                exchange that this process joins. Default: `dict`, there are none.

        Returns:
            The events of all processes, by rank, and the share of this one in a mean by numbers of samples.

        Raises:
            StepError: In all processes, if another one is at another event.
        """
        while True:
            events, share = self._wait(self.announce(kind, **numbers()))
            if all(event.kind != Kind.BACKWARD for event in events):
                break
            self._exchange_gradients(events, share)
        states = {(event.kind, event.history, event.detail) for event in events}
        if len(states) > 1:
            raise _differences(events)
        return events, share


def _differences(events: list[Event]) -> StepError:
    texts = []
    for rank, event in enumerate(events):
        text = _TEXTS[event.kind]
        if event.history != events[0].history:
            text += ", after other steps"
        elif event.kind == events[0].kind and event.detail != events[0].detail:
            text += ", but another one, or of another size"
        texts.append(f"process {rank} {text}")
    return StepError(
        f"In a step by hand the processes differ: {'; '.join(texts)}. They hold one set of weights, so all of them"
        " take the same steps. Let what a step does depend on `batch_idx`, or on values that are equal in all"
        " processes, as `self.all_gather` makes them. A process whose samples give no loss may run"
        " `self.manual_backward` on a loss of 0, or no backward, but it steps the same optimisers."
    )
