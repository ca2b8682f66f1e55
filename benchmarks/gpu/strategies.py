"""Items 7 and 8: strategies that are given the only GPU twice, and the memory of a pipeline."""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.gpu.campaign import Row
from benchmarks.gpu.measuring import Setting, TimedBatches, Window
from benchmarks.gpu.memory import MIB, collected
from benchmarks.gpu.networks import QUIET, Task, Training, by_hand, difference, loss_of, sgd
from benchmarks.gpu.steps import first_line, quiet, run_once
from equipoise import BalancedDataParallelStrategy, Callback, DDPStrategy, PipelineStrategy, Strategy, Trainer
from equipoise.extensions.pipeline.schedule.schedule import SCHEDULES

__all__ = ["pipeline_memory", "strategies"]

PARTS = 4
"""Parts of a batch, of all strategies and of the hand-written loop."""
MOST_DIFFERENCE = 1e-12
MOST_OF_TIME = 1.05
"""The time of a step, by that of a hand-written one in as many parts."""

MakeStrategy = Callable[[], Strategy | str]


def deep(setting: Setting, dtype: torch.dtype = torch.float64) -> Task:
    """Return a network of sixteen like layers, for any number of stages."""
    width = setting.pick(1024, 8)
    samples = setting.pick(2048, 8)

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(16)]
        return nn.Sequential(*layers, nn.Linear(width, 10)).to(dtype)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(number)
        features = torch.randn(samples, width, generator=draw).to(dtype)
        return features, torch.randint(10, (samples,), generator=draw)

    return Task("deep", make, batch)


# Item 7


def ways() -> dict[str, tuple[MakeStrategy, int]]:
    """Return the strategies, and how often each is given the device."""
    found: dict[str, tuple[MakeStrategy, int]] = {
        "dp": (lambda: "dp", PARTS),
        "balanced": (lambda: BalancedDataParallelStrategy(shares=[1] * PARTS), PARTS),
    }
    for schedule in SCHEDULES:
        make = partial(PipelineStrategy, micro_batches=PARTS, schedule=schedule)
        found[f"pipeline, {schedule}"] = (make, 2)
    return found


def strategies(setting: Setting) -> Iterator[Row]:
    """Compare strategies with a hand-written loop on the same device."""
    quiet()
    task = deep(setting)
    batches = task.batches(4, setting.device)
    steps = setting.pick(20, 2)
    hand = partial(by_hand, task, device=setting.device, optimizer=sgd)
    # 1. Gradients.
    expected = hand(batches)
    for name, (make, devices) in ways().items():
        try:
            module = Training(task, sgd)
            fit_with(module, DataLoader(batches, batch_size=None), setting, make(), devices)  # type: ignore[arg-type]
        except Exception as error:
            yield Row.holds(name, False, first_line(error))
            continue
        yield Row.at_most(f"{name}: largest difference of weights", difference(expected, module), MOST_DIFFERENCE)
    # 2. Times, in float32: many GPUs have little arithmetic in float64.
    single = deep(setting, torch.float32)
    batches = single.batches(4, setting.device)
    for name, (make, devices) in ways().items():
        split = partial(by_hand_in_parts, single, setting)
        ours = partial(fit_timed, single, setting, make, devices)
        ratios = []
        for _ in range(setting.pick(3, 1)):
            beside = run_once(split, batches, Window(setting, steps, 4)).time
            ratios.append(run_once(ours, batches, Window(setting, steps, 4)).time / beside)
        what = f"{name}: time by that of a hand-written step in {PARTS} parts"
        yield Row.at_most(what, median(ratios), MOST_OF_TIME, is_time=True)
    # 3. Two processes.
    yield from two_processes(task, setting)


def by_hand_in_parts(task: Task, setting: Setting, data: TimedBatches) -> None:
    """Train by hand on parts of batches."""
    by_hand(task, data.loader(), setting.device, optimizer=sgd, parts=PARTS)


def fit_timed(task: Task, setting: Setting, make: MakeStrategy, devices: int, data: TimedBatches) -> None:
    """Train with a strategy."""
    fit_with(Training(task, sgd), data.loader(), setting, make(), devices)


def fit_with(
    module: Training,
    loader: DataLoader[Any],
    setting: Setting,
    strategy: Strategy | str,
    devices: int,
    *callbacks: Callback,
) -> None:
    """Train with a strategy that is given the device several times."""
    trainer = Trainer(strategy=strategy, devices=[setting.device] * devices, callbacks=list(callbacks), **QUIET)
    trainer.fit(module, loader)


def two_processes(task: Task, setting: Setting) -> Iterator[Row]:
    """Compare two processes on one device, which exchange by way of the host, with one process."""
    features, labels = task.batch(0)
    samples = list(zip(features, labels, strict=True))
    size = len(samples) // 2
    one, two = Training(task, sgd), Training(task, sgd)
    fit_with(one, DataLoader(samples, size), setting, "single_device", 1)  # type: ignore[arg-type]
    strategy = DDPStrategy(backend="gloo")
    fit_with(two, DataLoader(samples, size // 2), setting, strategy, 2)  # type: ignore[arg-type]
    what = "ddp, two processes: largest difference of weights"
    yield Row.at_most(what, difference(one, two), MOST_DIFFERENCE)


# Item 8


class Predicted(Callback):
    """Compares the peak that was predicted with the cut and that of the second step."""

    def __init__(self, strategy: PipelineStrategy, setting: Setting) -> None:
        self.strategy = strategy
        self.setting = setting
        self.predicted = 0
        self.measured = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        if batch_idx == 1:
            run = self.strategy._run
            assert run is not None
            assert run.network.cut is not None
            self.predicted = sum(run.network.cut.peaks)
            torch.cuda.reset_peak_memory_stats(self.setting.device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End."""
        if batch_idx == 1:
            self.measured = torch.cuda.max_memory_allocated(self.setting.device)


class AfterTheNetwork(Training):
    """Multiplies matrices after the network's call, in the thread of each micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = batch[0]
        beside = (features.t() @ features).mean()
        return loss_of(self.network, batch) + 0.0 * beside


def pipeline_memory(setting: Setting) -> Iterator[Row]:
    """Compare predicted with measured peaks, and few with many micro-batches."""
    quiet()
    task = deep(setting)
    batches = DataLoader(task.batches(3, torch.device("cpu")), batch_size=None)  # type: ignore[arg-type]
    # 1. Both stages lie on one device: what they hold at their peaks is an upper bound of what they hold together.
    before = collected(setting)
    strategy = PipelineStrategy(micro_batches=PARTS)
    watch = Predicted(strategy, setting)
    adam_task = Training(task)
    fit_with(adam_task, batches, setting, strategy, 2, watch)
    yield Row("predicted peaks of both stages together", watch.predicted / MIB, "MiB")
    yield Row("measured peak of both", (watch.measured - before) / MIB, "MiB")
    ratio = (watch.measured - before) / watch.predicted
    yield Row("measured by predicted", ratio, "", "0.9 to 1.1", None if setting.is_small else 0.9 <= ratio <= 1.1)
    # 2. A thread that multiplies may get a workspace of its own.
    del adam_task, watch
    for count in (1, 16):
        before = collected(setting)
        module = AfterTheNetwork(task, sgd)
        few = PipelineStrategy(micro_batches=count)
        fit_with(module, batches, setting, few, 2)
        held = torch.cuda.memory_reserved(setting.device)
        yield Row(f"reserved after steps in {count} micro-batches", (held - before) / MIB, "MiB")
        del module
