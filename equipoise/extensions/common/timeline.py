"""Timeline of a step that is cut into stages, with its bubbles: what a strategy offers for the report to draw."""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Action", "Span", "Timeline"]


class Action(NamedTuple):
    """Action of a stage.

    Attributes:
        backward: True for a backward, False for a forward.
        micro_batch: Index of the micro-batch.
        weights: True for the second half of a split backward, the gradients of weights. Default: False.
    """

    backward: bool
    micro_batch: int
    weights: bool = False


class Span(NamedTuple):
    """An action as it ran.

    Attributes:
        stage: Index of the stage.
        action: Its action.
        begin, end: Times in seconds.
    """

    stage: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline as it ran.

    Attributes:
        spans: All actions, in order of their beginning.
        stages: Number of stages.
        stages_per_device: Number of stages on each device. Default: 1.
    """

    spans: tuple[Span, ...]
    stages: int
    stages_per_device: int = 1

    @property
    def devices(self) -> int:
        """Number of devices; stage s is computed by device s modulo that."""
        return self.stages // self.stages_per_device

    @property
    def seconds(self) -> float:
        """Seconds from the first beginning to the last end."""
        if not self.spans:
            return 0.0
        # Spans are in order of their beginning, but an earlier one may end later.
        last_end = max(span.end for span in self.spans)
        first_begin = min(span.begin for span in self.spans)
        return last_end - first_begin

    @property
    def idle(self) -> float:
        """The bubble: share of the devices' time in which they wait, from 0 to 1."""
        # Devices wait from the first beginning to the last end wherever they do not compute.
        available = self.seconds * self.devices
        if not available:
            return 0.0
        busy = sum(span.end - span.begin for span in self.spans)
        return 1 - busy / available
