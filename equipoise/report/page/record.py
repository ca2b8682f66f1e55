"""Record of a run: plain data from which a report is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from equipoise.memory.devices import DeviceInfo
from equipoise.memory.records import Composition, MemoryPoint

__all__ = ["Outcome", "PipelineStep", "RunEvent", "RunRecord", "StageSpan"]

Outcome = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Something that happened in a run.

    Attributes:
        seconds: When, since the run began; None if nobody knows.
        step: `trainer.global_step` at that moment; None if nobody knows.
        kind: What it was in a word or two, such as "out of memory" or "leak".
        text: What happened, in a sentence.
    """

    seconds: float | None
    step: int | None
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class StageSpan:
    """Something that a stage of a pipeline did.

    Attributes:
        stage: Its number, from 0.
        micro_batch: With which micro-batch, from 0.
        backward: Whether it was its backward.
        begin, end: When, in seconds.
        weights: Whether it was the second part of its backward, the gradients of weights. Default: False.
    """

    stage: int
    micro_batch: int
    backward: bool
    begin: float
    end: float
    weights: bool = False


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """A step of a pipeline as it ran.

    Attributes:
        spans: What the stages did.
        stages: Their names, such as those of their devices.
        devices: The names of the devices, where each has several stages: of p devices, stage s lies on that of number s
            modulo p. Default: each stage has its own.
        schedule: The name of the schedule.
        note: What is to be known about the times. Default: nothing.
    """

    spans: Sequence[StageSpan]
    stages: Sequence[str]
    devices: Sequence[str] = ()
    schedule: str = ""
    note: str = ""

    @property
    def rows(self) -> Sequence[str]:
        """The names of what does one thing at a time."""
        return self.devices or self.stages

    @property
    def idle(self) -> float:
        """The share of the devices' time in which they did nothing."""
        if not self.spans:
            return 0.0
        length = max(span.end for span in self.spans) - min(span.begin for span in self.spans)
        busy = sum(span.end - span.begin for span in self.spans)
        return 1 - busy / (length * len(self.rows)) if length else 0.0


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What is known of a run. Every part may be missing.

    Attributes:
        title: What was trained.
        started: When it began; `finished`: when it ended, or when the report was written.
        outcome: "running", "finished", "interrupted" or "failed".
        error: The traceback of a run that failed.
        facts: What a reader wants to know first: names and values.
        curves: For everything that was measured, and for each place where it was ("train", "val"), values by steps.
        epoch_ends: The last step of each epoch, by epochs done. Default: none is marked.
        throughput: How fast the run was over time: seconds since it began, and so many per second.
        throughput_unit: What was counted. Default: "samples per second".
        memory: Readings of memory, in the order of time.
        compositions: What the peak of each device was made of.
        pipeline: The last step of a pipeline; None where there was none.
        events: What happened, in the order of time.
        devices: What it ran on, as it was when it began.
        configuration: What was asked for, as YAML or any other text.
    """

    title: str
    started: datetime
    finished: datetime
    outcome: Outcome = "finished"
    error: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, Mapping[str, Mapping[float, float]]] = field(default_factory=dict)
    epoch_ends: Mapping[int, int] = field(default_factory=dict)
    throughput: Sequence[tuple[float, float]] = ()
    throughput_unit: str = "samples per second"
    memory: Sequence[MemoryPoint] = ()
    compositions: Sequence[Composition] = ()
    pipeline: PipelineStep | None = None
    events: Sequence[RunEvent] = ()
    devices: Sequence[DeviceInfo] = ()
    configuration: str = ""
