"""Collect the facts of a run for the report, from the trainer, its module and its callbacks."""

import contextlib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from equipoise.errors import ConfigurationError
from equipoise.memory.devices import format_bytes, read_memory
from equipoise.memory.out_of_memory import OutOfMemoryEvent
from equipoise.pipeline.schedule.timeline import Timeline
from equipoise.report.facts import checkpoint_callbacks, devices_of, shorten
from equipoise.report.learning_curves import group_curves
from equipoise.report.page.record import PipelineStep, RunEvent, RunRecord, StageSpan
from equipoise.report.page.scales import format_count, format_span
from equipoise.report.throughput import Throughput

__all__ = ["collect_record"]


def collect_record(
    trainer: Any,
    module: Any,
    *,
    curves: Mapping[str, Mapping[float, float]],
    epoch_ends: Mapping[int, int],
    throughput: Throughput,
    share: float | None,
    clock: float,
    started: datetime,
    first_step: int,
    folder: Path,
) -> RunRecord:
    """Puts together what is known of a fit.

    Args:
        trainer: Whose fit it is: ours or Lightning's.
        module: What was trained.
        curves: For every metric's name its values, by steps.
        epoch_ends: The last step of each epoch, by epochs done.
        throughput: How fast it was.
        share: The part of all samples that this process saw; None if nobody knows.
        clock: When the fit began, as `time.monotonic` counts.
        started: When it began, for people.
        first_step: The step where it began.
        folder: Where the run's files are.
    """
    timeline = getattr(_memory_logger(trainer), "timeline", ())
    unit = "batches per second" if throughput.countless else "samples per second"
    alone = trainer.world_size > 1 and share is None
    return RunRecord(
        title=type(module).__name__,
        started=started,
        finished=datetime.now().astimezone(),
        facts=dict(_facts(trainer, module, throughput, 1 / (share or 1.0), unit, timeline)),
        curves=group_curves(curves),
        epoch_ends=epoch_ends,
        throughput=throughput.points(clock, 1 / (share or 1.0)),
        throughput_unit=f"{unit} of the first process" if alone else unit,
        memory=list(timeline),
        compositions=list(getattr(_memory_logger(trainer), "compositions", ())),
        pipeline=_pipeline(trainer.strategy),
        events=_events(trainer, clock, first_step),
        configuration=_configuration(trainer, module, folder),
    )


def _memory_logger(trainer: Any) -> Any:
    """The first callback that keeps a time line of memory."""
    return next((each for each in trainer.callbacks if isinstance(getattr(each, "timeline", None), list)), None)


def _pipeline(strategy: Any) -> PipelineStep | None:
    """The last step of a strategy that keeps one."""
    timeline = getattr(strategy, "timeline", None)
    if not isinstance(timeline, Timeline) or not timeline.spans:
        return None
    devices = [str(device) for device in getattr(strategy, "devices", ())]
    names, rows = [f"stage {stage}" for stage in range(timeline.stages)], range(timeline.devices)
    if len(devices) == timeline.devices:
        names = [f"{name}, {devices[stage % len(devices)]}" for stage, name in enumerate(names)]
    several = [f"device {row}" + (f", {devices[row]}" if len(devices) == len(rows) else "") for row in rows]
    own = all(device == "cpu" for device in devices)
    return PipelineStep(
        spans=[
            StageSpan(
                stage=stage,
                micro_batch=did.micro_batch,
                backward=did.backward,
                weights=did.weights,
                begin=begin,
                end=end,
            )
            for stage, did, begin, end in timeline.spans
        ],
        stages=names,
        devices=several if timeline.stages_per_device > 1 else (),
        schedule=str(getattr(strategy, "schedule", "")),
        note="" if own else "Times are those at which the process gave devices their work, which they may do later.",
    )


# Facts.


def _facts(
    trainer: Any, module: Any, throughput: Throughput, factor: float, unit: str, timeline: Any
) -> list[tuple[str, str]]:
    facts = [
        (f"best {callback.monitor}", format_count(float(callback.best_model_score)))
        for callback in checkpoint_callbacks(trainer)
        if callback.monitor and callback.best_model_score is not None
    ]
    facts.append(("parameters", _parameters(module)))
    count = throughput.batches if throughput.countless else throughput.samples
    if throughput.seconds > 0 and count:
        facts.append((unit, format_count(round(factor * count / throughput.seconds, 1))))
    facts += [("epochs", f"{trainer.current_epoch:,}"), ("steps", f"{trainer.global_step:,}")]
    if throughput.seconds > 0:
        facts.append(("time in training", format_span(throughput.seconds)))
    facts += [("strategy", _strategy(trainer)), ("precision", str(trainer.precision)), *_peaks(trainer, timeline)]
    for callback in checkpoint_callbacks(trainer):
        if callback.best_model_path:
            kind = "best checkpoint" if callback.monitor else "checkpoint"
            facts.append((kind, shorten(callback.best_model_path)))
    return facts


def _parameters(module: Any) -> str:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    every, trained = sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)
    return format_count(every) + (f", {format_count(trained)} trained" if trained != every else "")


def _strategy(trainer: Any) -> str:
    name = getattr(trainer.strategy, "name", "") or type(trainer.strategy).__name__
    return f"{name}, {trainer.world_size} processes" if trainer.world_size > 1 else str(name)


def _peaks(trainer: Any, timeline: Any) -> list[tuple[str, str]]:
    """The peak of each device, from the time line or else as it stands now; with many devices, the highest alone."""
    peaks: dict[str, int] = {}
    for point in timeline:
        height = point.allocated if point.peak is None else point.peak
        peaks[point.device] = max(peaks.get(point.device, 0), height)
    if not peaks:
        for device in devices_of(trainer):
            with contextlib.suppress(ConfigurationError):  # a kind of device that has no readings
                if (peak := read_memory(device).peak) is not None:
                    peaks[str(device)] = peak
    if len(peaks) > 3:
        highest = max(peaks, key=lambda name: peaks[name])
        return [(f"highest peak memory: {highest}", format_bytes(peaks[highest]))]
    return [(f"peak memory, {name}", format_bytes(peak)) for name, peak in peaks.items()]


# Events.


def _events(trainer: Any, clock: float, first_step: int) -> list[RunEvent]:
    """What callbacks have noted, in the order of time."""
    events = []
    if first_step:
        path = getattr(trainer, "ckpt_path", None)
        text = f"Went on from {shorten(str(path))}." if path else "Went on from an earlier fit."
        events.append(RunEvent(seconds=0.0, step=first_step, kind="resumed", text=text))
    for callback in trainer.callbacks:
        noted = getattr(callback, "events", None)
        for event in noted if isinstance(noted, list) else ():
            if isinstance(event, OutOfMemoryEvent) and event.seconds >= clock:  # not of an earlier fit
                events.append(_out_of_memory(event, clock))
    leaks = getattr(_memory_logger(trainer), "leaks", ())
    events += [RunEvent(seconds=leak.seconds, step=leak.step, kind="leak", text=str(leak)) for leak in leaks]
    return sorted(events, key=lambda event: -1.0 if event.seconds is None else event.seconds)


def _out_of_memory(event: OutOfMemoryEvent, clock: float) -> RunEvent:
    return RunEvent(seconds=event.seconds - clock, step=event.step, kind="out of memory", text=str(event))


# Configuration.


def _configuration(trainer: Any, module: Any, folder: Path) -> str:
    """The configuration that lies with the run's files, else the module's hyperparameters."""
    # Where nobody named a folder, it is that of the program, and so is what lies there.
    own = {path.resolve() for path in (folder, Path(trainer.default_root_dir))} - {Path.cwd().resolve()}
    for path in (folder, Path(trainer.default_root_dir)):
        if path.resolve() in own and (path / "config.yaml").is_file():
            return (path / "config.yaml").read_text(encoding="utf-8", errors="replace")
    return "\n".join(_lines(dict(module.hparams)))


def _lines(values: Mapping[Any, Any], depth: int = 0) -> list[str]:
    """A mapping as text that reads like YAML; what is no plain value as Python prints it."""
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value and depth < 8:
            lines += [f"{'  ' * depth}{name}:", *_lines(value, depth + 1)]
        else:
            text = f"tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            lines.append(f"{'  ' * depth}{name}: {text if len(text) <= 500 else text[:500] + '…'}")
    return lines
