"""What is known of a run: plain data that anybody may collect, from which a report is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from equipoise.memory.devices import DeviceInfo
from equipoise.memory.records import Composition, MemoryPoint

__all__ = ["Outcome", "RunEvent", "RunRecord"]

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
class RunRecord:
    """What is known of a run. Every part may be missing.

    Attributes:
        title: What was trained.
        started: When it began; `finished`: when it ended, or when the report was written.
        outcome: "running", "finished", "interrupted" or "failed".
        error: The traceback of a run that failed.
        facts: What a reader wants to know first: names and values.
        curves: For everything that was measured, and for each place where it was ("train", "val"), values by epochs.
        throughput: How fast the run was over time: seconds since it began, and so many per second.
        throughput_unit: What was counted. Default: "samples per second".
        memory: Readings of memory, in the order of time.
        compositions: What the peak of each device was made of.
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
    throughput: Sequence[tuple[float, float]] = ()
    throughput_unit: str = "samples per second"
    memory: Sequence[MemoryPoint] = ()
    compositions: Sequence[Composition] = ()
    events: Sequence[RunEvent] = ()
    devices: Sequence[DeviceInfo] = ()
    configuration: str = ""
