"""Items 4, 11 and 14: batches that travel while others compute, and steps that are captured or compiled.

A feature that `Trainer` does not have yet is reported as not built.
"""

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu.campaign import Row
from benchmarks.gpu.measuring import Setting, TimedBatches, Window, seconds_of
from benchmarks.gpu.networks import QUIET, Task, Training, adam, mlp, sgd, transformer
from benchmarks.gpu.steps import first_line, fit, is_built, quiet, train_by_hand
from equipoise import Trainer
from equipoise.extensions.compiled.interop.compiling import why_not_compiled
from equipoise.extensions.compiled.interop.features import CAPTURE, COMPILE, COMPILE_BLOCKS

__all__ = ["captured_and_compiled", "compiled_blocks", "loader"]

NOT_BUILT = "not built"
MOST_OF_EAGER = 0.75
"""A captured or compiled step of the MLP, by the eager hand-written one."""
MOST_OF_EAGER_BLOCKS = 1.0
"""A step of the transformer with compiled layers, by the eager one."""
MOST_OF_THE_LONGER = 1.1
"""A step, by the longer of its copy and its computation."""


# Item 4


class Ready(Dataset[Any]):
    """The same large batch again and again, as workers would have made it."""

    def __init__(self, features: Tensor, labels: Tensor, count: int) -> None:
        self.features = features
        self.labels = labels
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features, self.labels


class Watched(Training):
    """Tells the window of each batch, since those of workers are fetched in other processes."""

    def __init__(self, task: Task, window: Window) -> None:
        super().__init__(task, sgd)
        self.window = window

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.window.on_fetch(batch_idx)


def loader(setting: Setting) -> Iterator[Row]:
    """Compare a step with its copy and its computation, each by itself."""
    quiet()
    width = 1024
    samples = setting.pick(2**24 // width, 8)  # 64 MiB of float32
    features = torch.randn(samples, width)
    labels = torch.randint(10, (samples,))
    task = Task("wide", partial(wide, width, setting.pick(24, 1)), lambda number: (features, labels))
    # 1. Both by themselves.
    pinned = features.pin_memory()
    repeats = setting.pick(20, 2)
    copy = seconds_of(lambda: pinned.to(setting.device, non_blocking=True), setting, repeats)
    yield Row.time("copy of a pinned batch", 1e3 * copy, "ms")
    compute = computation(task, setting)
    yield Row.time("computation of a step", 1e3 * compute, "ms")
    # 2. Together.
    longer = max(copy, compute)
    for name, options in {"pageable": {}, "pinned": {}, "pinned, prefetched": {"prefetch": True}}.items():
        if not all(map(is_built, options)):
            yield Row(f"step, {name}", NOT_BUILT)
            continue
        if not options and is_built("prefetch"):
            options = {"prefetch": False}
        seconds = seconds_of_a_step(task, setting, is_pinned="pinned" in name, options=options)
        what = f"step, {name}: by the longer of copy and computation"
        if "prefetched" in name:
            yield Row.at_most(what, seconds / longer, MOST_OF_THE_LONGER, is_time=True)
        else:
            yield Row.time(what, seconds / longer, "")


def wide(width: int, layers: int) -> nn.Module:
    """Return a network whose step takes about as long as the copy of its batch."""
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def computation(task: Task, setting: Setting) -> float:
    """Return the seconds of a step on a batch that is there already."""
    window = Window(setting, setting.pick(20, 2), 3)
    fit(Trainer, Training(task, sgd), TimedBatches(task.batches(1, setting.device), window).loader(), setting)
    assert window.measured is not None
    return window.measured.time / 1e6


def seconds_of_a_step(task: Task, setting: Setting, *, is_pinned: bool, options: dict[str, Any]) -> float:
    """Return the seconds of a step whose batch comes from four workers."""
    window = Window(setting, setting.pick(20, 2), 3)
    workers = 0 if setting.is_simulated else 4
    data = Ready(*task.batch(0), window.batches)
    batches = DataLoader(data, batch_size=None, num_workers=workers, pin_memory=is_pinned)
    fit(Trainer, Watched(task, window), batches, setting, **options)
    assert window.measured is not None
    return window.measured.time / 1e6


# Item 11


def captured_and_compiled(setting: Setting) -> Iterator[Row]:
    """Compare eager steps written by hand with captured and compiled ones."""
    quiet()
    task = mlp(setting)
    yield Row.time(
        "by hand, eager: time of a step", time_of(partial(train_by_hand, task, setting), task, setting), "µs"
    )
    for argument, feature in {"capture": CAPTURE, "compile": COMPILE}.items():
        title = f"Trainer({argument}=True)"
        if not is_built(argument):
            yield Row(title, NOT_BUILT)
        elif why_not_compiled(feature) is not None:
            yield Row(title, str(why_not_compiled(feature)))
        elif argument == "compile" and setting.is_simulated:
            yield Row(title, "simulated devices have no compiler")
        elif argument == "capture" and not setting.has_cuda:
            yield Row(title, "needs a CUDA device")
        else:
            yield from speedup(title, argument, task, setting)


def speedup(title: str, argument: str, task: Task, setting: Setting) -> Iterator[Row]:
    """Compare one way, in pairs with the hand-written loop."""
    ours = partial(train_with, task, setting, {argument: True})
    ratios = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(setting.pick(3, 1)):
                hand = time_of(partial(train_by_hand, task, setting), task, setting)
                ratios.append(time_of(ours, task, setting) / hand)
    except Exception as error:
        yield Row.holds(title, False, first_line(error))
        return
    # A step that computes something else stays eager, and a warning says why.
    reasons = [str(warning.message) for warning in caught if "eager" in str(warning.message)]
    yield Row.holds(f"{title}: is used", not reasons, "".join(reasons[:1])[:200])
    what = f"{title}: time by that of the eager hand-written step"
    yield Row.at_most(what, sorted(ratios)[len(ratios) // 2], MOST_OF_EAGER, is_time=True)


def train_with(task: Task, setting: Setting, options: dict[str, Any], data: TimedBatches) -> None:
    """Train with Equipoise."""
    fit(Trainer, Training(task, adam), data.loader(), setting, **options)


def time_of(run: Any, task: Task, setting: Setting, steps: int = 300) -> float:
    """Return the microseconds of a step."""
    window = Window(setting, setting.pick(steps, 3), setting.pick(50, 6))
    run(TimedBatches(task.batches(4, setting.device), window))
    assert window.measured is not None
    return window.measured.time


# Item 14


def compiled_blocks(setting: Setting) -> Iterator[Row]:
    """Compare steps whose layers are compiled one by one with eager ones."""
    quiet()
    title = "layers of the transformer"
    obstacle = "simulated devices have no compiler" if setting.is_simulated else why_not_compiled(COMPILE_BLOCKS)
    if obstacle is not None:
        yield Row(title, obstacle)
        return
    task = transformer(setting)
    rows: dict[str, str] = {}
    eager = partial(train_blocks, task, setting, False, rows)
    compiled = partial(train_blocks, task, setting, {"dynamic": False}, rows)
    ratios = []
    for _ in range(setting.pick(3, 1)):
        beside = time_of(eager, task, setting, steps=20)
        ratios.append(time_of(compiled, task, setting, steps=20) / beside)
    yield Row.holds(f"{title} are compiled", "compiled blocks" in rows, "a warning says why not")
    for name, value in rows.items():
        yield Row(name, value)
    what = f"{title}, compiled: time of a step by that of the eager one"
    yield Row.at_most(what, sorted(ratios)[len(ratios) // 2], MOST_OF_EAGER_BLOCKS, is_time=True)


def train_blocks(task: Task, setting: Setting, way: Any, rows: dict[str, str], data: TimedBatches) -> None:
    """Train, and note what the summary says of compiled blocks."""
    module = Training(task, adam)
    place = {"accelerator": "cuda" if setting.has_cuda else "cpu", "devices": 1}
    trainer = Trainer(**{**QUIET, **place, "precision": task.precision, "compile": way})
    trainer.fit(module, data.loader())
    rows.update({name: value for name, value in trainer.run_state.summary_rows.items() if "compiled" in name})
