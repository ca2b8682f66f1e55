"""Each limit is planted in a program, whose sentence names it; healthy programs have none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from equipoise import StepTimes
from equipoise.extensions.timing.limits import Facts, find_limit
from equipoise.extensions.timing.run_times import RunTimes
from tests.extensions.timing.programs import FIRST, Slow, Ticking, Validated, fit, loader
from tests.support.callback_runs import Clock

Program = Callable[[Clock, Path], StepTimes]


def slow_data(clock: Clock, folder: Path) -> StepTimes:
    return fit(Ticking(clock), loader(clock, 3.5, num_workers=0))[0]


def data_without_loader(clock: Clock, folder: Path) -> StepTimes:
    class Batches:
        def __iter__(self) -> Any:
            for _ in range(24):
                clock.tick(3.5)
                yield torch.ones(1, 2, dtype=torch.float64)

    return fit(Ticking(clock), Batches())[0]


def slow_callback(clock: Clock, folder: Path) -> StepTimes:
    return fit(Ticking(clock), loader(clock), callbacks=[Slow(clock, 3.5)])[0]


def slow_module_hook(clock: Clock, folder: Path) -> StepTimes:
    class Hooked(Ticking):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            clock.tick(3.5)

    return fit(Hooked(clock), loader(clock))[0]


def frequent_validation(clock: Clock, folder: Path) -> StepTimes:
    module = Validated(clock, validation=3.5)
    return fit(module, loader(clock), loader(clock, samples=2), val_check_interval=4, max_epochs=4)[0]


def large_validation(clock: Clock, folder: Path) -> StepTimes:
    return fit(Validated(clock, validation=3.5), loader(clock), loader(clock), max_epochs=4)[0]


def slow_checkpoints(clock: Clock, folder: Path) -> StepTimes:
    class ToASlowDisk(ModelCheckpoint):
        def on_train_batch_end(self, *arguments: Any) -> None:
            clock.tick(1.5)
            super().on_train_batch_end(*arguments)

    checkpoint = ToASlowDisk(folder, every_n_train_steps=8)
    return fit(Ticking(clock), loader(clock), callbacks=[checkpoint], enable_checkpointing=True)[0]


def frequent_logs(clock: Clock, folder: Path) -> StepTimes:
    class SlowLogger(CSVLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            clock.tick(3.5)

    class Logging(Ticking):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    return fit(Logging(clock), loader(clock), logger=SlowLogger(folder), log_every_n_steps=1)[0]


def slow_optimizer(clock: Clock, folder: Path) -> StepTimes:
    return fit(Ticking(clock, step=17.0), loader(clock))[0]


def tiny_batches(clock: Clock, folder: Path) -> StepTimes:
    module = Ticking(clock, forward=2**-12, backward=2**-13, step=2**-14)
    return fit(module, loader(clock, 2**-15, samples=2300))[0]


def python_in_the_step(clock: Clock, folder: Path) -> StepTimes:
    class Working(Ticking):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            # In the steps that are watched; the clock of the test goes on as it does in others.
            self.sum = sum(range(10**6)) if batch_idx < FIRST else 0
            return loss

    module = Working(clock, forward=2**-11, backward=2**-12, step=2**-14)
    return fit(module, loader(clock, samples=2300))[0]


def many_reads(clock: Clock, folder: Path) -> StepTimes:
    class Reading(Ticking):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            values = [self.layer.weight[0, 0].item() for _ in range(300)]
            self.log("sum", sum(values))
            return super().training_step(batch, batch_idx)

    return fit(Reading(clock), loader(clock))[0]


PLANTED: dict[Program, str] = {
    slow_data: "50% of the time is spent waiting for data: the loader has num_workers=0: try num_workers=2",
    data_without_loader: "49% of the time is spent waiting for data: let the loader read ahead",
    slow_callback: "the callback Slow takes 50% of the time",
    slow_module_hook: "hooks of the module take 50% of the time",
    frequent_validation: "validation every 4 steps takes 34% of the time: try val_check_interval=20",
    large_validation: "validation every 24 steps takes 51% of the time: try val_check_interval=1.0 and"
    " check_val_every_n_epoch=10",
    slow_checkpoints: "saving checkpoints takes 30% of the time: save 4 times less often",
    frequent_logs: "writing to loggers takes 50% of the time: try log_every_n_steps=10",
    slow_optimizer: "the optimiser takes 85% of the time: try fused=True in its constructor",
    python_in_the_step: "62% of the time passes in `training_step` between operations of torch, in other Python code:"
    " do this work in the data set",
    many_reads: "`training_step` reads 300 numbers of tensors, as `.item()`",
    tiny_batches: "a step takes 458 µs, mostly for calls of operations that compute little: try a larger batch_size",
}


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1}, raising=False)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("program", PLANTED, ids=lambda program: program.__name__)
def test_a_planted_limit_is_named(clock: Clock, tmp_path: Path, program: Program) -> None:
    limit = program(clock, tmp_path).limit
    assert limit.startswith(PLANTED[program])


def with_everything(clock: Clock, folder: Path) -> StepTimes:
    """A validation, checkpoints, a callback and waiting for data, each below a fifth."""
    module = Validated(clock, validation=0.25)
    options = {"enable_checkpointing": True, "max_epochs": 2}
    callbacks = [Slow(clock, 0.25), ModelCheckpoint(folder)]
    return fit(module, loader(clock, 0.5), loader(clock), callbacks=callbacks, **options)[0]


def reading_a_value(clock: Clock, folder: Path) -> StepTimes:
    """On a CPU `.item()` waits for nothing."""

    class Reading(Ticking):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss.item())
            return loss

    return fit(Reading(clock), loader(clock))[0]


def reads_of_torch(clock: Clock, folder: Path) -> StepTimes:
    """An optimiser reads how often each of its 30 parameters was stepped."""

    class ByHand(Ticking):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch) + sum(self.more).sum())
            self.optimizers().step()

        def configure_optimizers(self) -> Any:
            self.more = torch.nn.ParameterList(torch.ones(1, dtype=torch.float64) for _ in range(30))
            return torch.optim.Adam(self.more, foreach=False)

    return fit(ByHand(clock), loader(clock))[0]


def slow_first_steps(clock: Clock, folder: Path) -> StepTimes:
    """The compilation of the first steps is apart."""

    class Compiling(Ticking):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            clock.tick(1000.0 if batch_idx == 0 else 0.0)

    return fit(Compiling(clock), loader(clock))[0]


def short(clock: Clock, folder: Path) -> StepTimes:
    return fit(Ticking(clock), loader(clock, 100.0, samples=20))[0]


def small_steps_of_large_batches(clock: Clock, folder: Path) -> StepTimes:
    module = Ticking(clock, forward=2**-14, backward=2**-14, step=2**-14)
    return fit(module, loader(clock, samples=2**13, batch_size=256))[0]


HEALTHY = [
    with_everything,
    reading_a_value,
    reads_of_torch,
    slow_first_steps,
    short,
    small_steps_of_large_batches,
]


@pytest.mark.parametrize("program", HEALTHY, ids=lambda program: program.__name__)
def test_a_healthy_program_has_no_sentence(clock: Clock, tmp_path: Path, program: Program) -> None:
    times = program(clock, tmp_path)
    assert times.times is not None
    assert times.limit is None


# Remedies that depend on more than a program shows.


def describe_limit(times: RunTimes, facts: Facts) -> str | None:
    limit = find_limit(times, facts)
    return None if limit is None else str(limit)


def times(steps: int = 100, ranks: Any = (), **parts: float) -> RunTimes:
    named = {name.replace("_", " "): seconds for name, seconds in parts.items()}
    return RunTimes(sum(named.values()), steps, parts=named, ranks=list(ranks))


@pytest.mark.parametrize(
    ("workers", "processors", "remedy"),
    [(2, 16, "try num_workers=8"), (2, 2, "prepare the samples once"), (0, 1, "try num_workers=2")],
)
def test_the_number_of_workers_that_is_proposed(workers: int, processors: int, remedy: str) -> None:
    facts = Facts(num_workers=workers, processors=processors)
    limit = describe_limit(times(waiting_for_data=5.0, forward=5.0), facts)
    assert limit.endswith(f"num_workers={workers}: {remedy}" if "once" not in remedy else "once, before training")


def test_pinned_memory_is_proposed_for_copies() -> None:
    limit = describe_limit(times(copying_batches=5.0, forward=5.0), Facts())
    assert limit == "copying batches to the device takes 50% of the time: try pin_memory=True in the loader"


def test_accumulation_is_proposed_for_an_exchange() -> None:
    """Time of the exchange that is spent waiting for a slow process is none of its own."""
    parts = {"exchange": 4.0, "forward": 6.0}
    limit = describe_limit(times(ranks=[6.0, 6.0], **parts), Facts())
    assert limit == "exchanging gradients takes 40% of the time: try accumulate_grad_batches=4"
    limit = describe_limit(times(ranks=[6.0, 10.0], **parts), Facts())
    assert limit.startswith("rank 1 is 67% slower than the others, which wait 40% of the time for it")


def test_the_largest_limit_is_named() -> None:
    limit = describe_limit(times(waiting_for_data=3.0, callback_A=4.0, callback_B=3.5), Facts(num_workers=0))
    assert limit.startswith("the callback A takes 38%")


def test_ranks_that_differ_little_are_no_limit() -> None:
    assert describe_limit(times(ranks=[9.0, 9.5, 9.8], forward=10.0), Facts()) is None
