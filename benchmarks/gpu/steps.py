"""Items 2, 3 and 9: what a step costs over a hand-written one, what it waits for, and other precisions."""

import inspect
import logging
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from benchmarks.gpu.campaign import Row
from benchmarks.gpu.measuring import Measured, Setting, TimedBatches, Window
from benchmarks.gpu.networks import QUIET, Task, Training, adam, by_hand, fused_adam, mlp, transformer
from equipoise import Callback, MemoryLogger, OOMRecovery, Trainer

__all__ = ["fit", "is_built", "precisions", "quiet", "step_costs", "times", "waits"]

Run = Callable[[TimedBatches], object]
BY_HAND = "by hand"
FUSED = "fused_optimizer"
MOST_BARE, MOST_FULL = 5.0, 30.0
"""Microseconds of processor time over the hand-written loop: without and with logs."""
MOST_OF_TIME = 1.01
"""The ratio of the times of a step that keeps the device busy."""
LOGGED = 2
"""Values that a full step logs."""


def quiet() -> None:
    """Silence what others say about loaders, terminals and folders."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def is_built(argument: str) -> bool:
    """Tell whether `Trainer` has an argument."""
    return argument in inspect.signature(Trainer.__init__).parameters


def fit(
    trainer_class: Any,
    module: L.LightningModule,
    loader: DataLoader[Any],
    setting: Setting,
    **options: Any,
) -> None:
    """Train for one epoch on one device."""
    place = {"accelerator": "cuda" if setting.has_cuda else "cpu", "devices": 1}
    trainer = trainer_class(**{**QUIET, **place, **options})
    trainer.fit(module, loader)


def train_full(trainer_class: Any, task: Task, setting: Setting, data: TimedBatches) -> None:
    """Train with two logged values, a CSV logger and a progress bar."""
    module = Training(task, logged=True)
    with tempfile.TemporaryDirectory() as folder:
        options = {"logger": CSVLogger(folder), "enable_progress_bar": True, "precision": task.precision}
        fit(trainer_class, module, data.loader(), setting, **options)


# Item 2


def step_costs(setting: Setting) -> Iterator[Row]:
    """Compare the hand-written loop with both trainers."""
    quiet()
    yield from costs_of(mlp(setting), setting, steps=setting.pick(300, 3), rounds=setting.pick(7, 1))
    yield from costs_of(transformer(setting), setting, steps=setting.pick(20, 2), rounds=setting.pick(3, 1))


def contestants(task: Task, setting: Setting) -> dict[str, Run]:
    """Return all ways to train, by name."""
    precision = task.precision
    hand = partial(train_by_hand, task, setting)
    ways: dict[str, Run] = {
        BY_HAND: partial(hand, optimizer=adam),
        f"{BY_HAND}, fused": partial(hand, optimizer=fused_adam),
        "Equipoise": partial(train_ours, task, setting, adam, precision),
        "Equipoise, fused": partial(train_ours, task, setting, fused_adam, precision),
        "Equipoise, full": partial(train_full, Trainer, task, setting),
        "Lightning": lambda data: fit(L.Trainer, Training(task), data.loader(), setting, precision=precision),
        "Lightning, full": partial(train_full, L.Trainer, task, setting),
    }
    if is_built(FUSED):
        options = {"precision": precision, FUSED: True}
        ways[f"Equipoise, {FUSED}"] = lambda data: fit(Trainer, Training(task), data.loader(), setting, **options)
    return ways


def train_by_hand(task: Task, setting: Setting, data: TimedBatches, **options: Any) -> None:
    """Train by hand in the precision of the task."""
    by_hand(task, data.loader(), setting.device, **{"precision": task.precision, **options})


def costs_of(task: Task, setting: Setting, *, steps: int, rounds: int) -> Iterator[Row]:
    """Compare all ways to train a network."""
    runs = contestants(task, setting)
    measured = times(task, runs, setting, steps=steps, rounds=rounds)
    launches: dict[str, float] = {}
    if setting.has_cuda:
        launches = {name: counted(task, run, setting).launches for name, run in runs.items()}
    for name in runs:
        reference = f"{BY_HAND}, fused" if "fused" in name else BY_HAND
        hand = measured[reference]
        pairs = list(zip(measured[name], hand, strict=True))
        title = f"{task.name}, {name}"
        yield Row.time(f"{title}: time of a step", median(one.time for one, _ in pairs), "µs")
        if name == reference:
            yield Row.time(f"{title}: processor time of a step", median(one.processor for one, _ in pairs), "µs")
            yield from launches_of(title, launches.get(name))
            continue
        over = median(one.processor - other.processor for one, other in pairs)
        ratio = median(one.time / other.time for one, other in pairs)
        yield from judged(task, title, over, ratio)
        most = None
        if launches and name.startswith("Equipoise"):
            most = launches[reference] + 1 + (LOGGED if name.endswith("full") else 0)
        yield from launches_of(title, launches.get(name), most)


def launches_of(title: str, launches: float | None, most: float | None = None) -> Iterator[Row]:
    """Yield the launches of a step where they were counted, with their bound."""
    what = f"{title}: launches of a step"
    if launches is None:
        return
    if most is None:
        yield Row(what, launches)
    else:
        yield Row.at_most(what, launches, most)


def judged(task: Task, title: str, over: float, ratio: float) -> Iterator[Row]:
    """Compare a trainer with the hand-written loop; the bounds are Equipoise's."""
    is_ours = ", Equipoise" in title
    what = f"{title}: processor time over the hand-written step"
    most = MOST_FULL if title.endswith("full") else MOST_BARE
    # A busy device hides what the host does, and the host's time is that of waiting in its queue.
    if is_ours and task.name == "MLP":
        yield Row.at_most(what, over, most, "µs", is_time=True)
    else:
        yield Row.time(what, over, "µs")
    what = f"{title}: time by that of the hand-written step"
    if is_ours and task.name == "transformer":
        yield Row.at_most(what, ratio, MOST_OF_TIME, is_time=True)
    else:
        yield Row.time(what, ratio, "")


def times(task: Task, runs: dict[str, Run], setting: Setting, *, steps: int, rounds: int) -> dict[str, list[Measured]]:
    """Measure all ways to train, in an order that is shuffled in each round."""
    batches = task.batches(4, setting.device)
    measured: dict[str, list[Measured]] = {name: [] for name in runs}
    names = list(runs)
    dice = random.Random(0)
    for _ in range(rounds):
        dice.shuffle(names)
        for name in names:
            measured[name].append(run_once(runs[name], batches, Window(setting, steps, setting.pick(20, 2))))
    return measured


def counted(task: Task, run: Run, setting: Setting) -> Measured:
    """Count the launches of steps."""
    window = Window(setting, setting.pick(10, 2), setting.pick(20, 2), counts=True)
    return run_once(run, task.batches(4, setting.device), window)


def run_once(run: Run, batches: list[Any], window: Window) -> Measured:
    """Train, and return what the steps of the window took."""
    run(TimedBatches(batches, window))
    assert window.measured is not None
    return window.measured


# Item 3


class Guard(Callback):
    """Lets CUDA raise an error where the host waits in some steps.

    Args:
        first: The first of these steps.
        last: The last one.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        if batch_idx == self.first:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End."""
        if batch_idx == self.last:
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let the run end, which has to wait."""
        torch.cuda.set_sync_debug_mode("default")


def waits(setting: Setting) -> Iterator[Row]:
    """Show that steps do not wait, in two ways, since neither sees everything."""
    quiet()
    twice = [setting.device] * 2
    ways: dict[str, dict[str, Any]] = {
        "bare": {},
        "accumulated": {"accumulate_grad_batches": 2},
        "clipped": {"gradient_clip_val": 0.1},
        "OOMRecovery": {"callbacks": [OOMRecovery()]},
        "MemoryLogger in each step": {"callbacks": [MemoryLogger(every_n_steps=1, leaks=False)]},
        "bf16-mixed": {"precision": "bf16-mixed"},
        "16-mixed, fused": {"precision": "16-mixed"},
        "dp": {"strategy": "dp", "devices": twice},
        "pipeline": {"strategy": "pipeline", "devices": twice},
    }
    if is_built(FUSED):
        ways["16-mixed, clipped, fused_optimizer"] = {"precision": "16-mixed", "gradient_clip_val": 0.1, FUSED: True}
    task = mlp(setting)
    for name, options in ways.items():
        make = partial(Training, task, fused_adam if name.endswith("fused") else adam, logged=True)
        yield from waits_of(name, make, task, setting, options)


def waits_of(
    name: str, make: Callable[[], Training], task: Task, setting: Setting, options: dict[str, Any]
) -> Iterator[Row]:
    """Train once with errors for waits, and once counting them."""
    first, steps = 4, 16
    place = {"accelerator": "auto"} if "devices" in options else {}
    callbacks = options.get("callbacks", [])
    guarded = {**options, **place, "callbacks": [*callbacks, Guard(first + 1, first + steps - 4)]}
    batches = task.batches(4, setting.device)
    data = TimedBatches(batches, Window(setting, steps, first))
    try:
        fit(Trainer, make(), data.loader(), setting, **guarded)
        yield Row.holds(f"{name}: CUDA finds no wait", True)
    except Exception as error:
        yield Row.holds(f"{name}: CUDA finds no wait", False, first_line(error))
    window = Window(setting, steps, first, counts=True)
    fit(Trainer, make(), TimedBatches(batches, window).loader(), setting, **{**options, **place})
    assert window.measured is not None
    yield Row.at_most(f"{name}: waits for streams in a step", window.measured.waits, 0)


def first_line(error: Exception) -> str:
    """Return the kind and the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


# Item 9


def precisions(setting: Setting) -> Iterator[Row]:
    """Compare steps in other precisions with hand-written ones in the same."""
    quiet()
    task = transformer(setting)
    names = ["bf16-mixed", "16-mixed", "16-mixed, fused", "bf16-true", "32-true", "32-true, tf32"]
    for name in names:
        precision = name.partition(",")[0]
        optimizer = fused_adam if name.endswith("fused") else adam
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if name.endswith("tf32") else before)
        runs: dict[str, Run] = {
            BY_HAND: partial(train_by_hand, task, setting, optimizer=optimizer, precision=precision),
            "Equipoise": partial(train_ours, task, setting, optimizer, precision),
        }
        measured = times(task, runs, setting, steps=setting.pick(15, 2), rounds=setting.pick(3, 1))
        torch.set_float32_matmul_precision(before)
        hand = median(one.time for one in measured[BY_HAND])
        ours = median(one.time for one in measured["Equipoise"])
        yield Row.time(f"{name}, {BY_HAND}: time of a step", hand, "µs")
        yield Row.at_most(f"{name}, Equipoise: time by that of the hand-written step", ours / hand, 1.02, is_time=True)


def train_ours(task: Task, setting: Setting, optimizer: Any, precision: str, data: TimedBatches) -> None:
    """Train with Equipoise."""
    fit(Trainer, Training(task, optimizer), data.loader(), setting, precision=precision)
