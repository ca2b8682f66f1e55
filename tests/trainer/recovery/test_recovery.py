"""Training steps done again in parts when memory runs out: errors that are injected at any place of any step."""

import random
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from equipoise import BalancedDataParallelStrategy, ConfigurationError, OOMRecovery, Strategy
from equipoise.parallel.snapshot.state_snapshot import StepSnapshot
from tests.support import one_device
from tests.support.batches import CLASSES, FEATURES, SIZES, TOKENS, Batches
from tests.support.equality import assert_equal
from tests.support.networks.transparency import Base, Convolution, Frozen, Masked, MaskedOnTheHost, Mlp, Recurrent, Tied
from tests.support.one_device import Gradients, Run, assert_same_run, on_one_device
from tests.support.pairs import pairwise
from tests.support.resumption import SavesInHooks, seeded
from tests.support.trainer_runs import refuses, trainer
from tests.trainer.recovery.out_of_memory import PHASES, Answers, OutOfMemory, fit, run_out

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:Batch \d+ (of \d+ samples?|ran out)", r"ignore:cpu \(number \d\) ran out"),
    pytest.mark.usefixtures("quick_collections"),
]


def train(
    make: Callable[[], Base],
    injected: OutOfMemory | None = None,
    strategy: Strategy | str = "single_device",
    devices: int = 1,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> Run:
    """Train with a recovery that meets what is injected."""
    if injected is None:
        return one_device.train(make, strategy, devices, callbacks=[*callbacks], **options)
    recovering = [*callbacks, OOMRecovery(grow_after=3)]
    return one_device.train(lambda: injected.wrap(make()), strategy, devices, callbacks=recovering, **options)


# Equal to whole batches


@pytest.mark.quick_cases(8)
@pytest.mark.few_cases(5)
@pytest.mark.parametrize(
    ("make", "phase", "options"),
    pairwise(
        [Mlp, Convolution, Recurrent, Tied, Frozen, Masked, MaskedOnTheHost],
        PHASES,
        [{}, {"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.05}],
    ),
)
def test_gradients_of_micro_batches_are_those_of_whole_batches(
    make: type[Base], phase: str, options: dict[str, Any]
) -> None:
    injected = OutOfMemory(most=4, phase=phase)
    assert_same_run(on_one_device(make, **options), train(make, injected, **options))
    assert max(injected.sizes) <= 4


@pytest.mark.parametrize("phase", PHASES)
def test_failures_while_an_accumulation_window_is_done_again(phase: str) -> None:
    """The second batch fails, then the first when it is computed anew, then the second again."""
    injected = OutOfMemory(failing=(1, 2, 4, 6), phase=phase)
    assert_same_run(on_one_device(Mlp, accumulate_grad_batches=2), train(Mlp, injected, accumulate_grad_batches=2))


@pytest.mark.quick_cases(4)
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("case", range(25))
def test_any_failures(case: int) -> None:
    """Errors at random steps, in random phases, of random batches; the seed is printed."""
    print("seed:", seed := random.randrange(10**6))
    draw = random.Random(seed)
    make = draw.choice([Mlp, Recurrent, Masked, MaskedOnTheHost])
    failing = tuple(draw.sample(range(30), draw.randint(0, 6)))
    injected = OutOfMemory(draw.randint(1, 12), failing, draw.choice(PHASES))
    options: dict[str, Any] = {"accumulate_grad_batches": draw.randint(1, 3), "max_epochs": 1}
    options["sizes"] = [draw.randint(8, 14) for _ in range(draw.randint(1, 4))]
    strategy, devices = draw.choice([("single_device", 1), ("dp", 2), ("balanced", 3)])
    if strategy == "balanced":
        strategy = BalancedDataParallelStrategy(shares=[1, 3, 2])
    assert_same_run(train(make, **options), train(make, injected, strategy, devices, **options))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("make", "phase", "window"), pairwise([Mlp, Masked, MaskedOnTheHost], ["late", "backward"], [1, 3])
)
def test_bits_are_those_of_a_run_that_was_split_so_from_the_start(make: type[Base], phase: str, window: int) -> None:
    """Whatever the failed attempts had computed."""
    runs = [train(make, OutOfMemory(most=4, phase=each), accumulate_grad_batches=window) for each in ("forward", phase)]
    assert_equal(runs[0].module, runs[1].module)


# As if nothing had failed


class Noisy(Mlp):
    """With dropout, batch statistics, metrics and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(TOKENS * FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES)
        )
        self.accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["features"])
        loss = nn.functional.cross_entropy(logits, batch["label"]) + 0 * (random.random() + float(torch.rand(())))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", logits.detach().max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.accuracy(logits, batch["label"])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss


def result(run: Run) -> Any:
    """The traces of noise, statistics, logs and metrics."""
    return run.module, dict(run.trainer.callback_metrics), torch.get_rng_state(), random.getstate()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("phase", "window"), pairwise(PHASES, [1, 2, 3]))
def test_an_attempt_that_failed_leaves_no_trace(phase: str, window: int) -> None:
    """Done again without being cut, a step is the same to the bit."""
    injected = OutOfMemory(failing=(0, 3, 5, 6, 11), phase=phase)
    random.seed(7)
    expected = result(one_device.train(Noisy, accumulate_grad_batches=window))
    random.seed(7)
    again = one_device.train(lambda: injected.wrap(Noisy()), callbacks=[Answers(1)], accumulate_grad_batches=window)
    assert_equal(expected, result(again))
    assert injected.calls > len(injected.sizes)


@pytest.mark.parametrize(("method", "half_way"), [("mark", False), ("mark", True), ("restore", False)])
def test_memory_that_runs_out_while_the_state_is_noted_or_restored(
    method: str, half_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure in it that does not last changes nothing."""
    failing = (1,) if method == "restore" else ()
    random.seed(7)
    expected = result(train(Noisy, OutOfMemory(failing=failing)))
    usual, calls = getattr(StepSnapshot, method), count()

    def fails_once(self: StepSnapshot) -> None:
        first = next(calls) == 0
        if half_way or not first:
            usual(self)
        if first:
            run_out()

    monkeypatch.setattr(StepSnapshot, method, fails_once)
    random.seed(7)
    assert_equal(expected, result(train(Noisy, OutOfMemory(failing=failing))))
    assert next(calls) > 1


@pytest.mark.few_cases(3)
@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("batch", [3, 4, 5])
def test_an_accumulation_window_that_is_resumed_in_its_midst(batch: int, phase: str, tmp_path: Path) -> None:
    """Its first gradients come from the checkpoint, also when the step is done again."""
    seeded(7)
    one = Mlp()
    saves = SavesInHooks(tmp_path, ["on_train_batch_end"], [batch])
    fit(one, saves, accumulate_grad_batches=3)
    for failing in ((), (0,), (1,), (0, 1, 2, 4)):
        module, recovery = Mlp(), OOMRecovery(grow_after=1)
        OutOfMemory(failing=failing, phase=phase).wrap(module)
        fit(module, recovery, accumulate_grad_batches=3, ckpt_path=saves.saved[0].path)
        assert bool(recovery.events) == bool(failing)
        assert_equal(one, module, 1e-12)


# Sizes of micro-batches


def test_a_larger_size_is_tried_after_good_steps() -> None:
    """After three; where that fails, twice as many are waited for."""
    injected, recovery = OutOfMemory(most=6), OOMRecovery(grow_after=3)
    fit(injected.wrap(Mlp()), recovery, max_epochs=12)
    assert max(injected.sizes) <= 6
    tries = [event.step for event in recovery.events if event.parts == 1]
    assert tries == [0, 3, 10, 22, 46]  # behind 3, 6, 12 and 24 good steps


# Decisions


def test_batches_can_be_skipped() -> None:
    recovery = OOMRecovery("skip")
    run = fit(OutOfMemory(failing=(1, 4)).wrap(Mlp()), recovery, gradients := Gradients(), max_epochs=1)
    assert recovery.skipped == 2
    assert run.global_step == len(SIZES)
    assert gradients.seen[1]["net.1.weight"] is None
    with pytest.raises(torch.OutOfMemoryError, match=r"Batch 2 of 7 samples ran out of memory on cpu in forward"):
        fit(OutOfMemory(failing=(0, 1, 2)).wrap(Mlp()), OOMRecovery("skip", most_skipped=2))


def test_the_first_callback_that_decides_does() -> None:
    class Own(L.Callback):
        """Of Lightning."""

        def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> int:
            return 4

    injected = OutOfMemory(most=6)
    fit(injected.wrap(Mlp()), Answers(None), Own(), Answers(8), max_epochs=1)
    assert injected.sizes[:4] == [3, 3, 3, 2]


@pytest.mark.parametrize(
    ("make", "most", "message"),
    [
        (lambda: OOMRecovery("raise"), 5, r"ran out of memory on cpu in forward\. There were .* What would help, the"),
        (OOMRecovery, 0, r", computed in 11 parts, ran out .* A single sample does not fit"),
        # The same is not tried for ever.
        (lambda: Answers(1), 5, "ran out of memory"),
    ],
)
def test_an_error_says_what_would_help(make: Any, most: int, message: str) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=f"Batch 0 of 11 samples *{message}") as error:
        fit(OutOfMemory(most).wrap(Mlp()), make())
    assert "injected for" in str(error.value)
    assert "training_step" in str(error.value)  # where it was


def test_a_batch_that_cannot_be_cut_is_an_error() -> None:
    class Images(Mlp):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            run_out()

    batch = {"images": [torch.zeros(3, 4), torch.zeros(3, 5)], "label": torch.zeros(2)}
    with pytest.raises(torch.OutOfMemoryError, match=r"Define `batch_size\(self, batch\)`"):
        trainer(callbacks=[OOMRecovery()]).fit(Images(), DataLoader([batch], batch_size=None))  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [-1, True, "2"])
def test_answers_that_are_no_number_of_parts_are_refused(answer: Any) -> None:
    call = lambda: fit(OutOfMemory(most=5).wrap(Mlp()), Answers(answer))  # noqa: E731
    refuses(call, "Answers.on_out_of_memory returns a number of parts from 0", " not ")


def test_lightnings_trainer_is_refused() -> None:
    run = trainer(L.Trainer, callbacks=[OOMRecovery()])
    with pytest.raises(ConfigurationError, match=r"OOMRecovery works in equipoise\.Trainer only"):
        run.fit(Mlp().float(), DataLoader(Batches([4, 4]), batch_size=None))


def test_other_errors_are_left_alone() -> None:
    class Wrong(Mlp):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        fit(Wrong(), OOMRecovery())


# Evaluations


class Evaluated(Mlp):
    """Validates with a metric and a mean; more than so many samples do not fit."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.accuracy, self.most = MulticlassAccuracy(CLASSES), most

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch["features"])
        self.accuracy(logits, batch["label"])
        self.log("accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(logits, batch["label"]))
        if len(logits) > self.most:
            run_out()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch["label"]) > self.most:
            run_out()
        return self(batch["features"])


@pytest.mark.parametrize(("strategy", "devices"), [("single_device", 1), ("dp", 2)])
def test_evaluations_in_parts_are_those_of_whole_batches(strategy: str, devices: int) -> None:
    """Metrics, means and predictions; training's size is not touched."""
    found = []
    for most in (10**6, 2):
        torch.manual_seed(7)
        module, recovery = Evaluated(most), OOMRecovery()
        run = trainer(strategy=strategy, devices=devices, callbacks=[recovery], precision="64-true")
        data = DataLoader(Batches(SIZES), batch_size=None)
        found.append((run.validate(module, data, verbose=False), run.predict(module, data)))
        assert {event.phase for event in recovery.events} == ({"evaluation"} if most == 2 else set())
    assert_equal(*found, 1e-12)
