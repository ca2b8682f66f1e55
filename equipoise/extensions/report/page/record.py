"""Record of a run: plain data from which a report is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from equipoise.extensions.common.timeline import Timeline
from equipoise.memory.devices import DeviceInfo
from equipoise.memory.records import Composition, MemoryPoint

__all__ = ["LearningRateSearch", "Outcome", "PipelineStep", "ReportSection", "RunEvent", "RunRecord"]

Outcome = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Event of a run.

    Attributes:
        seconds: Time since the run began.
        step: `trainer.global_step` at that moment.
        kind: The kind of event in a word or two, such as "out of memory" or "leak".
        text: The event in a sentence.
    """

    seconds: float
    step: int
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """Step of a pipeline as it ran.

    Attributes:
        timeline: The computations of all stages.
        devices: Names of the devices, of which each computes one span at a time. Default: unnamed.
        schedule: Name of the schedule. Default: unnamed.
        note: Remark about the times. Default: none.
    """

    timeline: Timeline
    devices: Sequence[str] = ()
    schedule: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class LearningRateSearch:
    """Search for a learning rate before a fit.

    Attributes:
        points: Learning rates, and the smoothed loss after a step with each.
        suggested: The suggested rate; None if there were too few steps for one.
    """

    points: Sequence[tuple[float, float]]
    suggested: float | None = None


@dataclass(frozen=True)
class ReportSection:
    """Section of a report that another package adds. All of it is plain text, which the page escapes.

    Attributes:
        title: Its heading.
        text: A paragraph. Default: none.
        table: Rows of equal length below the paragraph, of which the first is the head. Default: no table.
        lines: Lines of a chart below the table, by name: values by step. Default: no chart.
        images: Images below the chart, by name: the content of PNG, JPEG or GIF files. Default: none.
        row_heads: Whether the first cell of each row of the table is the head of the row. Default: False.

    Example:
        >>> ReportSection("Weather", table=[("Day", "Degrees"), ("Monday", "21")]).title
        'Weather'
    """

    title: str
    text: str = ""
    table: Sequence[Sequence[str]] = ()
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    images: Mapping[str, bytes] = field(default_factory=dict)
    row_heads: bool = False


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Facts of a run, from which its report is drawn. Every fact but title and times may be missing.

    Attributes:
        title: Name of the trained module.
        started: Time of the start.
        finished: Time of the end, or of writing the report.
        outcome: "running", "finished", "interrupted" or "failed". Default: "finished".
        error: Traceback of a run that failed.
        origin: What was run, such as "run", "overrides", "command" and "commit", by names.
        facts: Names and values for the top of the report.
        curves: Values by step, for each measured quantity and each run stage ("train", "val").
        epoch_ends: The last step of each epoch, by epochs done. Default: none is marked.
        throughput: Points of throughput over time: seconds since the start, count per second.
        throughput_unit: Unit of the throughput. Default: "samples per second".
        memory: Readings of memory, in the order of time.
        compositions: Live tensors at the peak of each device.
        pipeline: The last step of a pipeline; None without a pipeline.
        learning_rates: The search for a learning rate before the fit; None without one.
        events: Events in the order of time.
        devices: Devices of the run, as they were when it began.
        sections: Sections that other packages add.
        configuration: Configuration of the run, as YAML or any other text.
    """

    title: str
    started: datetime
    finished: datetime
    outcome: Outcome = "finished"
    error: str = ""
    origin: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, Mapping[str, Mapping[float, float]]] = field(default_factory=dict)
    epoch_ends: Mapping[int, int] = field(default_factory=dict)
    throughput: Sequence[tuple[float, float]] = ()
    throughput_unit: str = "samples per second"
    memory: Sequence[MemoryPoint] = ()
    compositions: Sequence[Composition] = ()
    pipeline: PipelineStep | None = None
    learning_rates: LearningRateSearch | None = None
    events: Sequence[RunEvent] = ()
    devices: Sequence[DeviceInfo] = ()
    sections: Sequence[ReportSection] = ()
    configuration: str = ""
