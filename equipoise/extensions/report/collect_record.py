"""Collect the facts of a run for the report, from the trainer, its module and its callbacks."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import LearningRateFinder

from equipoise.extensions.common.page.markup import cut
from equipoise.extensions.common.page.scales import Point
from equipoise.extensions.common.suggested_rate import suggested_rate
from equipoise.extensions.common.timeline import Timeline
from equipoise.extensions.report.curve_history import CurveHistory, step_counts, steps_done
from equipoise.extensions.report.curve_names import group_curves
from equipoise.extensions.report.fit_recorder import Fit
from equipoise.extensions.report.page.record import LearningRateSearch, Outcome, PipelineStep, RunEvent, RunRecord
from equipoise.extensions.report.read_trainer import (
    best_scores,
    memory_logger_of,
    monitored,
    peaks_of,
    saved_checkpoints,
)
from equipoise.formats import format_bytes, format_count, format_path, format_span
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.memory.out_of_memory import OutOfMemoryEvent

__all__ = ["collect_facts", "collect_record", "collect_times", "pipeline_step"]

Fact = tuple[str, str]

# Peaks of devices that are listed one by one.
_MOST_PEAKS = 3
# Levels of nested hyperparameters, and characters of one value.
_DEEPEST = 8
_LONGEST_VALUE = 500


def collect_record(trainer: Any, module: Any, fit: Fit, curves: CurveHistory, folder: AnyPath) -> RunRecord:
    """Collect the facts of a fit."""
    memory_logger = memory_logger_of(trainer)
    return RunRecord(
        title=type(module).__name__,
        started=fit.started,
        finished=datetime.now().astimezone(),
        facts=_by_name(_facts(trainer, module, fit)),
        curves=group_curves(curves.step_curves()),
        epoch_ends=curves.epoch_ends(),
        throughput=fit.throughput.points(fit.clock, fit.factor),
        throughput_unit=fit.speed_unit,
        memory=list(getattr(memory_logger, "timeline", ())),
        compositions=list(getattr(memory_logger, "compositions", ())),
        pipeline=pipeline_step(trainer.strategy),
        learning_rates=learning_rate_search(trainer.callbacks),
        events=_events(trainer, fit),
        configuration=_configuration(trainer, module, folder),
    )


def collect_facts(trainer: Any, module: Any, fit: Fit, outcome: Outcome) -> dict[str, Any]:
    """Collect the facts of a fit that `run.json` holds."""
    now = datetime.now().astimezone()
    return {
        "module": type(module).__name__,
        "state": outcome,
        "began": fit.started.isoformat(),
        "seen": now.isoformat(),
        "seconds": (now - fit.started).total_seconds(),
        "epochs": int(trainer.current_epoch),
        "steps": steps_done(trainer),
        "peak_memory": peaks_of(trainer),
        "monitored": monitored(trainer),
    }


def collect_times(trainer: Any, fit: Fit) -> list[Point]:
    """Return steps done, and the seconds since the start.

    Each batch counts as the same part of a step, as with a constant `accumulate_grad_batches`.
    """
    batches = fit.throughput.progress(fit.clock)
    first = fit.first_step
    last = steps_done(trainer)
    if not batches or not last:
        return []
    _, all_batches = batches[-1]
    # A fit that is resumed at its end has none.
    if not all_batches:
        return []
    points = [(float(first), 0.0)]
    for seconds, count in batches:
        points.append((first + (last - first) * count / all_batches, seconds))
    return points


def learning_rate_search(callbacks: Iterable[Any]) -> LearningRateSearch | None:
    """Return the search of the first LearningRateFinder that has made one, None without a search."""
    for callback in callbacks:
        if not is_a(callback, LearningRateFinder) or callback.optimal_lr is None:
            continue
        results = callback.optimal_lr.results
        points = list(zip(results["lr"], results["loss"], strict=True))
        return LearningRateSearch(points=points, suggested=suggested_rate(callback.optimal_lr))
    return None


# The pipeline.


def pipeline_step(strategy: Any) -> PipelineStep | None:
    """Return the last step of a pipeline, None for other strategies and before the first step."""
    timeline = getattr(strategy, "timeline", None)
    if not isinstance(timeline, Timeline) or not timeline.spans:
        return None
    devices = [str(device) for device in getattr(strategy, "devices", ())]
    # Other devices compute asynchronously.
    note = ""
    if any(device != "cpu" for device in devices):
        note = "Times are those at which the process gave devices their work, which they may do later."
    return PipelineStep(
        timeline=timeline,
        devices=devices if len(devices) == timeline.devices else (),
        schedule=str(getattr(strategy, "schedule", "")),
        note=note,
    )


# Facts.


def _facts(trainer: Any, module: Any, fit: Fit) -> Iterator[Fact]:
    """Yield the names and values at the top of the report."""
    for name, score in best_scores(trainer):
        yield name, format_count(score)
    yield "parameters", _parameters(module)
    if fit.speed:
        yield fit.speed_unit, format_count(round(fit.speed, 1))
    yield "epochs", f"{trainer.current_epoch:,}"
    for name, steps in step_counts(trainer).items():
        yield name, f"{steps:,}"
    if fit.throughput.seconds > 0:
        yield "time in training", format_span(fit.throughput.seconds)
    yield "strategy", _strategy(trainer)
    yield "precision", str(trainer.precision)
    yield from _peaks(trainer)
    yield from saved_checkpoints(trainer)


def _by_name(facts: Iterable[Fact]) -> dict[str, str]:
    """Return facts by name; several of a name, as the checkpoints of two callbacks, are one text."""
    values: dict[str, list[str]] = {}
    for name, value in facts:
        values.setdefault(name, []).append(value)
    return {name: ", ".join(dict.fromkeys(several)) for name, several in values.items()}


def _parameters(module: Any) -> str:
    total = 0
    trainable = 0
    for parameter in module.parameters():
        size = parameter.numel()
        total += size
        if parameter.requires_grad:
            trainable += size
    text = format_count(total)
    if trainable != total:
        text += f", {format_count(trainable)} trained"
    return text


def _strategy(trainer: Any) -> str:
    strategy = trainer.strategy
    # Lightning's strategies have no name.
    name = str(getattr(strategy, "name", "") or type(strategy).__name__)
    if trainer.world_size > 1:
        name += f", {trainer.world_size} processes"
    return name


def _peaks(trainer: Any) -> list[Fact]:
    """Return the peak of each device; with many devices, the highest alone."""
    peaks = peaks_of(trainer)
    if len(peaks) > _MOST_PEAKS:
        highest = max(peaks, key=lambda name: peaks[name])
        return [(f"highest peak memory: {highest}", format_bytes(peaks[highest]))]
    return [(f"peak memory, {name}", format_bytes(peak)) for name, peak in peaks.items()]


# Events.


def _events(trainer: Any, fit: Fit) -> list[RunEvent]:
    """Return the events that callbacks have recorded, in the order of time, without those of an earlier fit."""
    events = []
    if fit.first_step:
        origin = "an earlier fit"
        path = getattr(trainer, "ckpt_path", None)
        if path:
            origin = format_path(str(path))
        event = RunEvent(
            seconds=0.0,
            step=fit.first_step,
            kind="resumed",
            text=f"Continued from {origin}.",
        )
        events.append(event)
    for callback in trainer.callbacks:
        # Callbacks of others may use the name for something else.
        recorded = getattr(callback, "events", None)
        if not isinstance(recorded, list):
            continue
        for record in recorded:
            if isinstance(record, OutOfMemoryEvent) and record.seconds >= fit.clock:
                event = RunEvent(
                    seconds=record.seconds - fit.clock,
                    step=record.step,
                    kind="out of memory",
                    text=str(record),
                )
                events.append(event)
    for leak in getattr(memory_logger_of(trainer), "leaks", ()):
        event = RunEvent(
            seconds=leak.seconds,
            step=leak.step,
            kind="leak",
            text=str(leak),
        )
        events.append(event)
    return sorted(events, key=lambda event: event.seconds)


# Configuration.


def _configuration(trainer: Any, module: Any, folder: AnyPath) -> str:
    """Return the configuration beside the run's files, else the module's hyperparameters."""
    working_directory = Path.cwd().resolve()
    for path in (folder, to_path(trainer.default_root_dir)):
        file = path / "config.yaml"
        # The working directory is the default: a file there may belong to another program.
        is_ours = True
        if isinstance(path, Path):
            is_ours = path.resolve() != working_directory
        if is_ours and file.is_file():
            return file.read_text(encoding="utf-8", errors="replace")
    return "\n".join(_lines(dict(module.hparams)))


def _lines(values: Mapping[Any, Any], depth: int = 0) -> list[str]:
    """Format a mapping like YAML; values that YAML does not have appear as Python prints them."""
    lines = []
    indent = "  " * depth
    for name, value in values.items():
        # A mapping may contain itself.
        if isinstance(value, Mapping) and value and depth < _DEEPEST:
            lines.append(f"{indent}{name}:")
            lines += _lines(value, depth + 1)
        else:
            lines.append(f"{indent}{name}: {_value(value)}")
    return lines


def _value(value: object) -> str:
    if isinstance(value, torch.Tensor):
        text = f"tensor of {tuple(value.shape)}"
    else:
        text = repr(value)
    return cut(text, _LONGEST_VALUE)
