"""Meetings of the processes in a step by hand, where each tells the others what it is about to do.

Each backward, each step of an optimiser and each end of a `training_step` is an event, of which all processes exchange
one row of numbers on the host:

    process 0   backward   backward    step       end        those at a backward exchange gradients, and all others
    process 1   backward   step, joins step       end        join with what they have; at any other event all wait

A step of an optimiser is no event if all processes have had a backward since the last one, and none has joined: what
each has stepped is part of its next event.

So a process that has no backward where others have one, or fewer of them, is no obstacle. Where processes step
different optimisers, or one has ended its step, all raise one error.
"""

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

# Rows of numbers in an exchange, one for each process, and the exchange.
Sent = tuple[torch.Tensor, dist.Work]
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
    """An event in one process, as a row of numbers.

    Attributes:
        kind: A `Kind`.
        history: A number that stands for the training step, and for the steps of optimisers so far.
        detail: What events of one kind that are alike have in common: the optimiser, or the parameters.
        weight: The number of samples of the step in this process.
        loss: The loss of an optimiser's closure; NaN where nothing reads it.
        compared: The number of tensors that the processes compare.
        total: Their sum.
        size: The sum of their absolute values.
    """

    kind: float
    history: float
    detail: float = 0
    weight: float = 1
    loss: float = 0
    compared: float = 0
    total: float = 0
    size: float = 0


class Meetings:
    """Lets the processes meet at their events.

    Args:
        join: Function that exchanges gradients where others are at a backward.

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
        self._note(_BEGIN_OF_STEP)
        self._weight = weight

    def _note(self, event: int) -> None:
        """Add an event to the history."""
        # A number that float64 holds exactly.
        self._history = hash((self._history, event)) % 2**48

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
        self._note(number)
        self.needs_meeting = True
        self.has_joined = False

    def break_off(self) -> None:
        """Note that this process has left an exchange in its midst, by an error that the user's code may catch."""
        self._has_left_exchange = True

    @property
    def factor(self) -> float:
        """The factor of the gradients of this process in their sum; after the first meeting."""
        assert self.reference is not None
        return self._weight / self.reference

    def send(self, kind: Kind, **numbers: float) -> Sent:
        """Begin to exchange an event. Return what `receive` takes.

        Args:
            kind: Its kind.
            numbers: Other numbers of it, by the names of `Event`.
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

    def receive(self, sent: Sent) -> tuple[list[Event], Share]:
        """Return the events of all processes, by rank, and the share of this one in a mean by numbers of samples."""
        rows, work = sent
        work.wait()
        events = [Event(*row) for row in rows.tolist()]
        if self.reference is None:
            self.reference = events[0].weight or 1.0
        samples = sum(event.weight for event in events)
        share = Share(self.factor, samples / self.reference)
        # Without any sample, all have equal parts.
        if not samples:
            share = Share(1.0, self._size)
        return events, share

    def exchange(self, sent: Sent) -> None:
        """Exchange the gradients of a backward whose event was sent, and which some processes may not have."""
        events, share = self.receive(sent)
        self._exchange_gradients(events, share)

    def _exchange_gradients(self, events: list[Event], share: Share) -> None:
        """Exchange gradients, since some process is at a backward."""
        if any(event.kind != Kind.BACKWARD for event in events):
            self.has_joined = True
        self.needs_meeting = self.has_joined
        self._join(share)
        # A process that is a step ahead is found once what it has sent is received.
        histories = {event.history for event in events}
        if len(histories) > 1:
            raise _differences(events)

    def meet(self, kind: Kind, numbers: Callable[[], dict[str, float]] = dict) -> tuple[list[Event], Share]:
        """Wait until all processes are at an event of this kind, and join those that are at a backward until then.

        Args:
            kind: The kind of the event.
            numbers: Function that returns its other numbers; it is called again after an exchange. Default: there are
                none.

        Raises:
            StepError: In all processes, if another one is at another event.
        """
        while True:
            sent = self.send(kind, **numbers())
            events, share = self.receive(sent)
            if all(event.kind != Kind.BACKWARD for event in events):
                break
            self._exchange_gradients(events, share)
        different = {(event.kind, event.history, event.detail) for event in events}
        if len(different) > 1:
            raise _differences(events)
        return events, share


def _differences(events: list[Event]) -> StepError:
    texts = []
    for rank, event in enumerate(events):
        text = _TEXTS[Kind(int(event.kind))]
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
