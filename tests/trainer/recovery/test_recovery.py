"""Steps done again in parts when memory runs out: errors that are injected at any place of any step."""

import random
import warnings
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

from equipoise import BalancedDataParallelStrategy, Callback, ConfigurationError, OOMRecovery, Strategy, Trainer
from equipoise.parallel.snapshot.state_snapshot import StepSnapshot
from equipoise.trainer.recovery.micro_batching import MicroBatcher
from tests.support import one_device
from tests.support.batches import CLASSES, FEATURES, SIZES, TOKENS, Batches
from tests.support.equality import assert_equal
from tests.support.networks.transparency import Base, Convolution, Frozen, Masked, MaskedOnTheHost, Mlp, Recurrent, Tied
from tests.support.one_device import Gradients, Run, assert_same_run, on_one_device
from tests.support.trainer_runs import trainer

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:Batch \d+ (of \d+ samples?|ran out)", r"ignore:cpu \(number \d\) ran out"),
    pytest.mark.usefixtures("quick_collections"),
]


class OutOfMemory:
    """Injects errors into training steps.

    Args:
        most: More samples than this do not fit.
        failing: Calls of the step that fail unless they have a single sample, counted from 0.
        phase: Where: "forward", "late" (all of forward was done) or "backward".
    """

    def __init__(self, most: int = 10**6, failing: tuple[int, ...] = (), phase: str = "forward") -> None:
        self.most, self.failing, self.phase, self.calls = most, failing, phase, 0
        self.sizes: list[int] = []

    def wrap(self, module: Any) -> Any:
        step = module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            size = len(batch["features"])
            fails = size > self.most or (size > 1 and self.calls in self.failing)
            self.calls += 1
            if fails and self.phase == "forward":
                raise torch.OutOfMemoryError(f"injected for {size} samples")
            out = step(batch, batch_idx)
            if fails and self.phase == "late":
                raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
            if fails:
                loss = out if isinstance(out, Tensor) else out["loss"]
                loss.register_hook(self.fail)
            else:
                self.sizes.append(size)
            return out

        module.training_step = training_step
        return module

    @staticmethod
    def fail(gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("injected in the backward")


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


MODULES = [Mlp, Convolution, Recurrent, Tied, Frozen, Masked, MaskedOnTheHost]
PHASES = ["forward", "late", "backward"]


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)
def test_gradients_are_those_of_whole_batches(make: type[Base], phase: str) -> None:
    injected = OutOfMemory(most=4, phase=phase)
    assert_same_run(on_one_device(make), train(make, injected))
    assert max(injected.sizes) <= 4


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("make", [Mlp, Masked])
def test_with_options(make: type[Base], phase: str) -> None:
    for options in ({"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.05}):
        assert_same_run(on_one_device(make, **options), train(make, OutOfMemory(most=4, phase=phase), **options))


@pytest.mark.quick_cases(4)
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


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("phase", ["late", "backward"])
@pytest.mark.parametrize("make", [Mlp, Masked, MaskedOnTheHost])
def test_bits_are_those_of_a_run_that_was_split_so_from_the_start(make: type[Base], phase: str, window: int) -> None:
    """Whatever the failed attempts had computed."""
    runs = [train(make, OutOfMemory(most=4, phase=each), accumulate_grad_batches=window) for each in ("forward", phase)]
    for expected, actual in zip(*(run[0].parameters() for run in runs), strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("phase", PHASES)
def test_bits_are_those_of_a_loop_by_hand(phase: str) -> None:
    """Which weighs each piece by its share of the batch."""
    injected = OutOfMemory(most=4, phase=phase)
    actual = train(Mlp, injected)[0]
    torch.manual_seed(7)
    module, sizes = Mlp().double(), iter(injected.sizes)
    optimizer = module.configure_optimizers()
    for _ in range(2):
        for batch in Batches(SIZES):
            features, done = batch["features"].double(), 0
            optimizer.zero_grad()
            while done < len(features):
                end = done + next(sizes)
                loss = nn.functional.cross_entropy(module(features[done:end]), batch["label"][done:end])
                (loss * ((end - done) / len(features))).backward()
                done = end
            optimizer.step()
    for expected, parameter in zip(module.parameters(), actual.parameters(), strict=True):
        assert torch.equal(expected, parameter)


class Cuts(Callback):
    """Wants a number of micro-batches."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> int:
        return self.parts


def test_the_size_of_a_batch_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many micro-batches it has."""
    found: list[int] = []
    original = MicroBatcher.size

    def size(self: MicroBatcher, parts: Any) -> int:
        found.append(original(self, parts))
        return found[-1]

    monkeypatch.setattr(MicroBatcher, "size", size)
    counts = []
    for parts in (2, 8):
        found.clear()
        train(Mlp, OutOfMemory(failing=(0,)), sizes=[8], callbacks=(Cuts(parts),), max_epochs=1)
        assert found.count(8 // parts) >= parts
        counts.append(found.count(8))
    assert counts[0] == counts[1]


class Noisy(Mlp):
    """With dropout, batch statistics, metrics and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(TOKENS * FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES)
        )
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["features"])
        loss = nn.functional.cross_entropy(logits, batch["label"]) + 0 * (random.random() + float(torch.rand(())))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", logits.detach().max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.accuracy(logits, batch["label"])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss


class SameAgain(Callback):
    """Tries the same once more."""

    def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> int | None:
        return 1


def assert_identical(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    for (name, expected), actual in zip(one[0].state_dict().items(), other[0].state_dict().values(), strict=True):
        assert torch.equal(expected, actual), name
    assert {k: float(v) for k, v in one[2].callback_metrics.items()} == {
        k: float(v) for k, v in other[2].callback_metrics.items()
    }
    assert torch.equal(torch.get_rng_state(), torch.get_rng_state())


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_an_attempt_that_failed_leaves_no_trace(phase: str, window: int) -> None:
    """Done again without being cut, a step is the same to the bit: noise, statistics, logs and metrics."""
    states = []
    runs = []
    for injected in (None, OutOfMemory(failing=(0, 3, 5, 6, 11), phase=phase)):
        torch.manual_seed(7)
        random.seed(7)
        module, gradients = Noisy(), Gradients()
        callbacks: list[Any] = [gradients]
        if injected is not None:
            injected.wrap(module)
            callbacks.append(SameAgain())
        runs.append((module, gradients.seen, fit(module, callbacks, accumulate_grad_batches=window)))
        states.append((torch.get_rng_state(), random.getstate()))
    assert_identical(*runs)
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]


def fit(module: Any, callbacks: list[Any], ckpt_path: Any = None, **options: Any) -> Trainer:
    run: Trainer = trainer(callbacks=callbacks, **{"precision": "64-true", "max_epochs": 2, **options})
    run.fit(module, DataLoader(Batches(SIZES), batch_size=None), ckpt_path=ckpt_path)
    return run


def test_growing_again() -> None:
    """After three good steps a larger size is tried; where that fails, twice as many are waited for."""
    injected = OutOfMemory(most=6)
    recovery = OOMRecovery(grow_after=3)
    module = injected.wrap(Mlp())
    fit(module, [recovery], max_epochs=12)
    assert max(injected.sizes) <= 6
    tries = [event.step for event in recovery.events if event.parts == 1]
    assert tries == [0, 3, 10, 22, 46]  # behind 3, 6, 12 and 24 good steps


def test_skipping() -> None:
    injected = OutOfMemory(failing=(1, 4))
    recovery, module = OOMRecovery("skip"), injected.wrap(Mlp())
    run = fit(module, [recovery, gradients := Gradients()], max_epochs=1)
    assert recovery.skipped == 2
    assert run.global_step == len(SIZES)
    assert gradients.seen[1]["net.1.weight"] is None
    with pytest.raises(torch.OutOfMemoryError, match=r"Batch 2 of 7 samples ran out of memory on cpu in forward"):
        fit(OutOfMemory(failing=(0, 1, 2)).wrap(Mlp()), [OOMRecovery("skip", most_skipped=2)])


@pytest.mark.parametrize(
    ("policy", "most", "message"),
    [
        (
            "raise",
            5,
            r"Batch 0 of 11 samples ran out of memory on cpu in forward\. There were .* What would help, the most",
        ),
        ("split", 0, r"Batch 0 of 11 samples, computed in 11 parts, ran out .* A single sample does not fit"),
    ],
)
def test_errors_say_what_would_help(policy: Any, most: int, message: str) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=message) as error:
        fit(OutOfMemory(most).wrap(Mlp()), [OOMRecovery(policy)])
    assert "injected for" in str(error.value)
    assert "training_step" in str(error.value)  # where it was


def test_batches_that_cannot_be_cut() -> None:
    class Images(Mlp):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise torch.OutOfMemoryError("injected")

    class Loader:
        def __iter__(self) -> Any:
            return iter([{"images": [torch.zeros(3, 4), torch.zeros(3, 5)], "label": torch.zeros(2)}])

    with pytest.raises(torch.OutOfMemoryError, match=r"Define `batch_size\(self, batch\)`"):
        trainer(callbacks=[OOMRecovery()]).fit(Images(), Loader())


def test_the_same_is_not_tried_for_ever() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Batch 0 of 11 samples ran out of memory"):
        fit(OutOfMemory(most=5).wrap(Mlp()), [SameAgain()])


@pytest.mark.parametrize("answer", [-1, True, "2", 2.0])
def test_answers_that_cannot_be(answer: Any) -> None:
    class Wrong(Callback):
        def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> Any:
            return answer

    with pytest.raises(ConfigurationError, match=r"Wrong\.on_out_of_memory returns a number of parts from 0.* not"):
        fit(OutOfMemory(most=5).wrap(Mlp()), [Wrong()])


@pytest.mark.parametrize("phase", PHASES)
def test_failures_while_a_window_is_done_again(phase: str) -> None:
    """The second batch fails, then the first when it is computed anew, then the second again."""
    injected = OutOfMemory(failing=(1, 2, 4, 6), phase=phase)
    assert_same_run(on_one_device(Mlp, accumulate_grad_batches=2), train(Mlp, injected, accumulate_grad_batches=2))


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("batch_idx", [2, 3, 4])
def test_a_window_that_is_resumed_in_its_midst(batch_idx: int, phase: str, tmp_path: Path) -> None:
    """Its first gradients come from the checkpoint, also when the step is done again."""

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if (trainer.current_epoch, index) == (0, batch_idx):
                trainer.save_checkpoint(tmp_path / "x.ckpt")

    torch.manual_seed(7)
    one = Mlp()
    fit(one, [Save()], accumulate_grad_batches=3)
    for failing in ((), (0,), (1,), (0, 1, 2, 4)):
        module, recovery = Mlp(), OOMRecovery(grow_after=1)
        OutOfMemory(failing=failing, phase=phase).wrap(module)
        fit(module, [recovery], accumulate_grad_batches=3, ckpt_path=tmp_path / "x.ckpt")
        assert bool(recovery.events) == bool(failing)
        assert_equal(one, module, 1e-12)


def test_lightnings_trainer_is_refused() -> None:
    run = trainer(L.Trainer, callbacks=[OOMRecovery()])
    with pytest.raises(ConfigurationError, match=r"OOMRecovery works in equipoise\.Trainer only"):
        run.fit(Mlp().float(), DataLoader(Batches([4, 4]), batch_size=None))


def test_other_errors_are_left_alone() -> None:
    class Wrong(Mlp):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        fit(Wrong(), [OOMRecovery()])


@pytest.mark.parametrize("method", ["mark", "restore"])
@pytest.mark.parametrize("half_way", [False, True])
def test_memory_that_runs_out_around_the_step_itself(
    method: str, half_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noting and restoring the state takes memory, too. A failure in it that does not last changes nothing."""
    injected = {"failing": (1,)} if method == "restore" else {}
    reference = train(Noisy, OutOfMemory(**injected))
    usual = getattr(StepSnapshot, method)
    calls = count()

    def fails_once(self: StepSnapshot) -> None:
        first = next(calls) == 0
        if half_way or not first:
            usual(self)
        if first:
            raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(StepSnapshot, method, fails_once)
    assert_identical(reference, train(Noisy, OutOfMemory(**injected)))
    assert next(calls) > 1


def test_memory_that_stays_short_around_the_step_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: StepSnapshot) -> None:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(StepSnapshot, "mark", fails)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        train(Noisy, OutOfMemory())


class LowOnMemory(torch.optim.SGD):
    """Runs out of memory in some of its steps, counted from 0; before or after it has changed anything."""

    def __init__(self, parameters: Any, failing: tuple[int, ...], after: bool = False) -> None:
        super().__init__(parameters, lr=0.1)
        self.failing, self.after, self.calls = failing, after, 0

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.calls += 1
        fails = self.calls - 1 in self.failing
        if fails and not self.after:
            raise torch.OutOfMemoryError("injected in the step")
        super().step()
        if fails:
            raise torch.OutOfMemoryError("injected in the step")
        return loss


def optimised(make: Callable[[Any], Any], bare: bool) -> Mlp:
    """A module with an optimiser of its own; bare: its step takes no closure, as those of torch, called directly."""

    class Module(Mlp):
        def configure_optimizers(self) -> Any:
            own = make(self.parameters())
            if not bare:
                return own
            optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.1)
            optimizer.step = lambda: own.step()
            return optimizer

    return Module()


def answering(answer: Any) -> Callback:
    class Own(Callback):
        def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> Any:
            return answer

    return Own()


@pytest.mark.parametrize("policy", ["split", "skip", "raise"])
def test_the_policy_decides_about_the_step_of_the_optimizer(policy: Any) -> None:
    recovery = OOMRecovery(policy)
    module = optimised(lambda parameters: LowOnMemory(parameters, (1,)), bare=True)
    if policy == "raise":
        with pytest.raises(torch.OutOfMemoryError, match=r"Batch 1 ran .* in optimizer step.*smaller batches would"):
            fit(module, [recovery], max_epochs=1)
    else:
        with pytest.warns(UserWarning, match=r"Batch 1 ran out .* in optimizer step\. It is done once more\."):
            run = fit(module, [recovery], max_epochs=1)
        assert run.global_step == len(SIZES)
    assert [(event.phase, event.can_repeat) for event in recovery.events] == [("optimizer step", True)]
    assert recovery.skipped == 0


@pytest.mark.parametrize(("answer", "goes_on"), [(None, False), (0, False), (1, True), (2, True)])
def test_any_callback_decides_about_the_step_of_the_optimizer(answer: Any, goes_on: bool) -> None:
    module = optimised(lambda parameters: LowOnMemory(parameters, (1,)), bare=True)
    if goes_on:
        fit(module, [answering(answer)])
    else:
        with pytest.raises(torch.OutOfMemoryError, match="in optimizer step"):
            fit(module, [answering(answer)])


@pytest.mark.parametrize(("failing", "after", "events"), [((1,), True, [False]), ((1, 2), False, [True, False])])
def test_steps_of_the_optimizer_that_cannot_be_done_again(
    failing: tuple[int, ...], after: bool, events: list[bool]
) -> None:
    """Something was changed, or it is the second time: nothing is announced that is not done."""
    recovery = OOMRecovery()
    module = optimised(lambda parameters: LowOnMemory(parameters, failing, after), bare=True)
    with pytest.raises(torch.OutOfMemoryError, match=r"in optimizer step.* already.*smaller batches would not"):
        fit(module, [recovery])
    assert [event.can_repeat for event in recovery.events] == events


@pytest.mark.parametrize("overridden", [False, True])
@pytest.mark.parametrize("policy", ["split", "skip", "raise"])
def test_a_step_that_takes_a_closure(policy: Any, overridden: bool) -> None:
    """An optimiser that is not torch's, or an `optimizer_step` of the module."""
    module: Any = optimised(lambda parameters: LowOnMemory(parameters, (1,)), bare=False)
    if overridden:
        module.optimizer_step = lambda epoch, batch_idx, optimizer, closure: optimizer.step(closure=closure)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"Batch 1 ran .* in optimizer step.* closure .*would help"
    ) as error:
        fit(module, [recovery := OOMRecovery(policy)])
    assert "The allocator said: injected in the step" in str(error.value)
    assert [(event.phase, event.can_repeat) for event in recovery.events] == [("optimizer step", False)]


def test_batches_are_cut_within_a_closure() -> None:
    """And errors in the closure are told once."""
    make = lambda parameters: LowOnMemory(parameters, ())  # noqa: E731
    injected, recovery = OutOfMemory(most=6), OOMRecovery()
    fit(injected.wrap(optimised(make, bare=False)), [recovery])
    assert max(injected.sizes) <= 6
    with pytest.raises(torch.OutOfMemoryError, match="A single sample does not fit") as error:
        fit(OutOfMemory(most=0).wrap(optimised(make, bare=False)), [recovery := OOMRecovery()])
    assert str(error.value).count("The allocator said") == 1
    assert {event.phase for event in recovery.events} == {"forward"}


def test_lightning_callbacks_may_decide() -> None:
    class Own(L.Callback):
        def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> int:
            return 2

    injected = OutOfMemory(most=6)
    fit(injected.wrap(Mlp()), [Own()])
    assert max(injected.sizes) <= 6


class Evaluated(Mlp):
    """Validates with a metric and a mean; more than so many samples do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.most = MulticlassAccuracy(CLASSES), 10**6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch["features"])
        self.accuracy(logits, batch["label"])
        self.log("accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(logits, batch["label"]))
        if len(logits) > self.most:
            raise torch.OutOfMemoryError("injected")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch["label"]) > self.most:
            raise torch.OutOfMemoryError("injected")
        return self(batch["features"])


@pytest.mark.parametrize(("strategy", "devices"), [("single_device", 1), ("dp", 2)])
def test_evaluations(strategy: str, devices: int) -> None:
    """Metrics, means and predictions are those of whole batches; training's size is not touched."""
    found = []
    for most in (10**6, 2):
        torch.manual_seed(7)
        module, recovery = Evaluated(), OOMRecovery()
        module.most = most
        run = trainer(strategy=strategy, devices=devices, callbacks=[recovery], precision="64-true")
        data = DataLoader(Batches(SIZES), batch_size=None)
        results = run.validate(module, data, verbose=False)[0]
        predictions = run.predict(module, data)
        assert predictions is not None
        found.append((results, predictions))
        assert {event.phase for event in recovery.events} == ({"evaluation"} if most == 2 else set())
    (expected, outputs), (actual, others) = found
    assert actual == pytest.approx(expected, rel=1e-12)
    for one, other in zip(outputs, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def run_out() -> None:
    raise torch.OutOfMemoryError("injected")


class ByHand(Mlp):
    """Optimises by hand; runs out of memory in the second step.

    Args:
        place: Where.
    """

    def __init__(self, place: str) -> None:
        super().__init__()
        self.automatic_optimization, self.place = False, place

    def training_step(self, batch: Any, batch_idx: int) -> None:
        place = self.place if batch_idx == 1 else ""
        optimizer: Any = self.optimizers()
        if place == "forward":
            run_out()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        if place == "backward":
            loss.register_hook(lambda gradient: run_out())
        self.manual_backward(loss)
        if place == "training step":
            run_out()
        if place == "optimizer step":
            optimizer.optimizer.register_step_pre_hook(lambda *_: run_out())
        optimizer.step()
        if place == "after the step":
            run_out()


@pytest.mark.parametrize("policy", ["split", "skip", "raise"])
@pytest.mark.parametrize("place", ["forward", "backward", "training step", "optimizer step", "after the step"])
def test_manual_optimisation_says_that_it_cannot(place: str, policy: Any) -> None:
    """And announces nothing else; where it was is told as far as anybody knows."""
    phase = "training step" if place == "after the step" else place
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Batch")
        with pytest.raises(torch.OutOfMemoryError, match=f"Batch 1 of .* on cpu in {phase}\\..* optimises by hand"):
            fit(ByHand(place), [recovery := OOMRecovery(policy)])
    (event,) = recovery.events
    assert (event.phase, event.most_parts, event.can_repeat, recovery.skipped) == (phase, 1, False, 0)
    assert "optimises by hand" in event.obstacle


def test_manual_optimisation_with_a_closure_says_where_it_was() -> None:
    """The closure is a step of its own within that of the optimiser."""

    class WithClosure(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            def closure() -> Tensor:
                loss = Mlp.training_step(self, batch, batch_idx)
                if self.place == "training step":
                    run_out()
                if self.place == "backward":
                    loss.register_hook(lambda gradient: run_out())
                self.manual_backward(loss)
                return loss

            optimizer: Any = self.optimizers()
            if self.place == "optimizer step":
                optimizer.optimizer.register_step_post_hook(lambda *_: run_out())
            optimizer.step(closure=closure)

    for place in ("training step", "backward", "optimizer step"):
        with pytest.raises(torch.OutOfMemoryError, match=f"in {place}.*optimises by hand"):
            fit(WithClosure(place), [OOMRecovery()])
