"""Manual optimisation under virtual devices: the same as on one device, and to the bit on any number of processes."""

import contextvars
import threading
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from equipoise import Trainer, VirtualDevicesStrategy
from equipoise.errors import StepError
from tests.conftest import ignoring
from tests.extensions.virtual.test_strategy import SaveAfter, assert_equal
from tests.support.quiet import QUIET
from tests.support.trainer_runs import refuses

# A scaler skips the first steps.
pytestmark = ignoring("Detected call of `lr_scheduler.step")

SAMPLES = 68


class Adversaries(L.LightningModule):
    """Two networks that are trained against each other, without random numbers and statistics of a batch.

    Args:
        window: The number of batches that a step of an optimiser uses.
        clip: The largest norm of gradients; None: any.
    """

    def __init__(self, window: int = 1, clip: float | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.window = window
        self.clip = clip
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))
        self.mean = MeanMetric()

    def noise(self, real: Tensor) -> Tensor:
        return real.flip(1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        optimizers: Any = self.optimizers()
        self.fake = self.generator(self.noise(real))
        steps = (batch_idx + 1) % self.window == 0
        for index, name in enumerate(("discriminator", "generator")):
            self.toggle_optimizer(optimizers[index])
            loss = self.loss(name, real)
            self.manual_backward(loss / self.window)
            if steps:
                if self.clip:
                    self.clip_gradients(optimizers[index], self.clip, "norm")
                optimizers[index].step()
                optimizers[index].zero_grad()
                schedulers: Any = self.lr_schedulers()
                schedulers[index].step()
            self.untoggle_optimizer(optimizers[index])
            self.log(name, loss, on_step=True, on_epoch=True)
        self.mean(self.fake.detach())
        self.log("mean", self.mean)
        self.log("largest", self.fake.max(), reduce_fx="max")

    def loss(self, name: str, real: Tensor) -> Tensor:
        if name == "generator":
            return nn.functional.softplus(-self.discriminator(self.generator(self.noise(real)))).mean()
        of_fake = self.discriminator(self.fake.detach())
        return (nn.functional.softplus(-self.discriminator(real)) + nn.functional.softplus(of_fake)).mean()

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.discriminator.parameters(), 0.05, momentum=0.9)
        second = torch.optim.Adam(self.generator.parameters(), 0.01, betas=(0.5, 0.9))
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97) for optimizer in (first, second)]
        return [first, second], schedulers


class Noisy(Adversaries):
    """Noise, statistics of a batch, and dropout; one graph of the generator serves both of its uses."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.generator.insert(1, nn.BatchNorm1d(8))
        self.discriminator.insert(1, nn.Dropout(0.3))

    def noise(self, real: Tensor) -> Tensor:
        return torch.randn_like(real)

    def loss(self, name: str, real: Tensor) -> Tensor:
        if name == "generator":
            return nn.functional.softplus(-self.discriminator(self.fake)).mean()
        return super().loss(name, real)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.discriminator(self.generator(batch[0])).square().mean() + torch.rand(()))


def run(
    kind: type[L.LightningModule],
    devices: int,
    *,
    strategy: Any = None,
    ckpt_path: Path | None = None,
    batch_size: int = 15,
    shuffle: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Train, and return the weights, the states of the optimisers and what was logged."""
    L.seed_everything(5, verbose=False)
    of_module = {name: options.pop(name) for name in ("window", "clip") if name in options}
    of_strategy = {name: options.pop(name) for name in ("count", "shares") if name in options}
    strategy = strategy or VirtualDevicesStrategy(**{"count": 4, **of_strategy})
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=devices, **{"max_epochs": 2, **QUIET, **options})
    draw = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(SAMPLES, 3, generator=draw, dtype=torch.float32))
    module = kind(**of_module)
    loader = DataLoader(data, batch_size=batch_size, shuffle=shuffle)
    val_loader = DataLoader(data, batch_size=10) if isinstance(module, Noisy) else None
    trainer.fit(module, loader, val_loader, ckpt_path=ckpt_path)
    state = {**module.state_dict(), **trainer.callback_metrics, "steps": trainer.global_step}
    for number, optimizer in enumerate(trainer.optimizers):
        state[f"{number}.lr"] = optimizer.param_groups[0]["lr"]
        for index, entries in optimizer.state_dict()["state"].items():
            state |= {f"{number}.{index}.{name}": value for name, value in entries.items()}
    return state


@cache
def on_one_device(kind: type[L.LightningModule], **options: Any) -> dict[str, Any]:
    return run(kind, 1, **options)


@pytest.mark.parametrize("options", [{}, {"window": 3, "clip": 0.1}], ids=["", "window"])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_as_on_one_device(count: int, options: dict[str, Any]) -> None:
    """The last step has three samples, so some parts have none, and sizes of parts differ."""
    options = {**options, "shuffle": False, "precision": "64-true", "batch_size": 13}
    expected = run(Adversaries, 1, strategy="single_device", **options)
    state = run(Adversaries, 1, count=count, **options)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        # The metric adds in single precision.
        tolerance = 1e-6 if name == "mean" else 1e-12
        torch.testing.assert_close(torch.as_tensor(state[name]), torch.as_tensor(value), rtol=tolerance, atol=tolerance)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 3, "clip": 0.1},
    {"precision": "bf16-mixed"},
    {"precision": "16-mixed", "clip": 0.1},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("devices", [2, 3])
def test_equal_to_the_bit(devices: int, options: dict[str, Any]) -> None:
    assert_equal(run(Noisy, devices, **options), on_one_device(Noisy, **options))


@pytest.mark.slow
def test_unequal_devices_and_processes_without_samples() -> None:
    """The last step has three samples, of which the last process has none."""
    options = {"count": 7, "batch_size": 13, "window": 2}
    expected = on_one_device(Adversaries, **options)
    assert_equal(run(Adversaries, 3, shares=[1, 3, 2], **options), expected)
    assert_equal(run(Adversaries, 2, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("batches", [2, 4, 6])
def test_continued_on_another_number(tmp_path: Path, batches: int) -> None:
    """Gradients that wait for a step of an optimiser are continued, too."""
    path = tmp_path / "x.ckpt"
    options = {"window": 3, "clip": 0.1}
    run(Noisy, 2, callbacks=[SaveAfter(batches, path)], **options)
    for devices in (1, 3):
        assert_equal(run(Noisy, devices, ckpt_path=path, **options), on_one_device(Noisy, **options))


# What parts see

context = contextvars.ContextVar("context", default="")


class Watching(Adversaries):
    """Notes what its parts see, in a list that all have."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.counter = 0
        self.drawn = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, _ = self.optimizers()
        self.counter += 1
        self.drawn = torch.rand(())
        first = self.drawn
        self.discriminator.eval()
        self.generator.requires_grad_(False)
        self.log("one", 1.0)
        weight = self.discriminator[0].weight
        before = weight.detach().clone()
        self.manual_backward(self.discriminator(batch[0]).square().mean())
        assert self.drawn is first
        assert not self.discriminator.training
        assert not any(parameter.requires_grad for parameter in self.generator.parameters())
        assert torch.equal(weight, before)
        gradient = weight.grad.clone()
        norm = nn.utils.clip_grad_norm_(self.discriminator.parameters(), 0.01)
        optimizer.step()
        assert not torch.equal(weight, before)
        self.generator.requires_grad_(True)
        self.lr_schedulers()[0].step()
        rate = optimizer.param_groups[0]["lr"]
        modes = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.get_num_threads(), context.get()
        later = torch.rand(())
        optimizer.zero_grad()
        self.seen.append((self.counter, gradient, norm, rate, modes, self.trainer.global_step, first, later))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.discriminator[0].weight.grad.norm())


def test_what_parts_see() -> None:
    """All have the same gradients, rates and counts, and attributes and numbers of their own."""
    context.set("of the caller")
    L.seed_everything(1, verbose=False)
    module = Watching()
    strategy = VirtualDevicesStrategy(count=4)
    trainer = Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, precision="bf16-mixed", **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(16, 3)), batch_size=8))
    assert module.counter == trainer.global_step == 2
    assert len(module.seen) == 8
    for step in range(2):
        parts = module.seen[4 * step : 4 * step + 4]
        for counter, gradient, norm, rate, modes, steps, _, _ in parts:
            assert (counter, steps) == (step + 1, step + 1)
            assert torch.equal(gradient, parts[0][1])
            assert torch.equal(norm, parts[0][2])
            assert rate == pytest.approx(0.05 * 0.97 ** (step + 1))
            assert modes == (True, True, 1, "of the caller")
        assert len({float(number) for part in parts for number in part[-2:]}) == 8
    assert trainer.callback_metrics["norm"] <= 0.0101


class ByClosure(Adversaries):
    """Computes in closures."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[0]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.discriminator(batch[0]).square().mean()
            self.manual_backward(loss)
            return loss

        self.log("loss", optimizer.step(closure))


def test_closures() -> None:
    options = {"shuffle": False, "precision": "64-true", "batch_size": 13}
    expected = run(ByClosure, 1, strategy="single_device", **options)
    for name, value in run(ByClosure, 1, **options).items():
        torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(expected[name]), rtol=1e-12, atol=1e-12)


# What is refused


class BySamples(Adversaries):
    """Steps if its samples say so."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.discriminator(batch[0]).mean())
        if batch[0][0, 0] > 0:
            self.optimizers()[0].step()


class ByLoss(Adversaries):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.discriminator(batch[0]).mean()
        self.manual_backward(loss)
        self.optimizers()[0].step()
        self.lr_schedulers()[0].step(loss)


class PastTheModule(Adversaries):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.discriminator(batch[0]).mean().backward()


class Changing(Adversaries):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.generator[0].weight.mul_(0.9)


class Growing(Adversaries):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("all", torch.zeros(0))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.all = torch.cat([self.all, batch[0].flatten()])


class SearchesLines(ByClosure):
    def configure_optimizers(self) -> Any:
        return [torch.optim.LBFGS(self.discriminator.parameters()), torch.optim.SGD(self.generator.parameters(), 1.0)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (BySamples, "Part 2 of batch 0 steps optimiser 0, where part 0 ends its `training_step`"),
        (ByLoss, r"Part 1 of batch 0 steps scheduler 0 \(.*\), where part 0 steps scheduler 0"),
        (PastTheModule, "Call `self.manual_backward"),
        (Changing, "changes 'generator.0.weight'"),
        (Growing, "gives a buffer another shape"),
        (SearchesLines, "as LBFGS has it"),
    ],
)
def test_steps_that_are_refused(kind: Any, words: str) -> None:
    before = threading.active_count()
    with pytest.raises(StepError, match=words):
        run(kind, 1)
    assert threading.active_count() == before


@pytest.mark.slow
def test_other_steps_in_another_process_are_refused() -> None:
    with pytest.raises(StepError, match=r"Part \d of batch 0"):
        run(BySamples, 4)


def test_options_that_are_refused() -> None:
    refuses(lambda: run(Adversaries, 1, profiler="simple"), "optimises by hand", "profiler")


@pytest.mark.parametrize("part", [0, 2, 3])
@pytest.mark.parametrize("catches", [False, True])
def test_an_error_ends_all_parts(part: int, catches: bool) -> None:
    class Fails(Adversaries):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first_value = batch[0][0, 0].item()
            try:
                self.manual_backward(self.discriminator(batch[0]).mean())
                if first_value == 4 * part:
                    raise KeyError("of the user")
                self.optimizers()[0].step()
            except BaseException:
                if not catches or first_value:
                    raise

    module = Fails()
    trainer = Trainer(strategy=VirtualDevicesStrategy(count=4), accelerator="cpu", max_epochs=1, **QUIET)
    features = torch.arange(16.0)[:, None].expand(16, 3)
    before = threading.active_count()
    expected: Any = StepError if part == 0 and catches else KeyError
    with pytest.raises(expected) as caught:
        trainer.fit(module, DataLoader(TensorDataset(features), batch_size=16))
    if expected is KeyError:
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert frames[-1] == "training_step"
        assert frames.count("training_step") == 1
    assert threading.active_count() == before
