"""Counters, schedules and values mean what their names say, also where a scaler skips steps or validations are rare."""

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import ConfigurationError
from tests.support.trainer_runs import Small, Validated, loader, trainer


class ByHand(Small):
    """Two parts, which two optimisers of its own step, with gradients of norm 2 that are clipped to 0.5."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.order = order
        self.first = nn.Parameter(torch.zeros(4))
        self.second = nn.Parameter(torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = dict(zip("ab", self.optimizers(), strict=True))
        self.manual_backward(self.first.sum() + self.second.sum())
        for action in self.order.split():
            optimizer = optimizers[action[-1]]
            if action.startswith("clip"):
                self.clip_gradients(optimizer, 0.5, "norm")
            else:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.first], lr=1.0), torch.optim.SGD([self.second], lr=1.0)


@pytest.mark.parametrize(
    ("order", "precision"),
    [
        ("clip-a step-a clip-b step-b", "32-true"),
        ("clip-a step-a clip-b step-b", "16-mixed"),
        ("clip-a clip-b step-a step-b", "16-mixed"),
        ("clip-b step-a step-b", "16-mixed"),
    ],
)
def test_gradients_that_are_clipped_by_hand_are_unscaled(order: str, precision: str) -> None:
    module = ByHand(order)
    run = trainer(precision=precision)
    run.fit(module, loader(3))
    for name, parameter in (("a", module.first), ("b", module.second)):
        norm = 0.5 if f"clip-{name}" in order else 2.0
        assert float(parameter.detach().norm()) == pytest.approx(3 * norm, rel=1e-3)
    assert run.global_step == 6


class Overflowing(Small):
    """Its loss is too large for float16 in the first steps."""

    def __init__(self, interval: str, frequency: int = 1) -> None:
        super().__init__()
        self.interval = interval
        self.frequency = frequency
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        loss = self.loss(batch)
        if len(self.rates) <= 2:
            return loss.float() * 1e30
        return loss * 1e-3

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": self.interval, "frequency": self.frequency}]


def test_a_step_that_the_scaler_skips_moves_no_schedule_and_counts_in_global_step() -> None:
    module, run = Overflowing("step"), trainer(precision="16-mixed", detect_nonfinite=False)
    run.fit(module, loader(5))
    assert run.global_step == 5
    assert module.rates == [1.0, 1.0, 1.0, 0.5, 0.25]


def test_a_frequency_counts_no_step_that_the_scaler_skips(tmp_path: Path) -> None:
    run = trainer(precision="16-mixed", detect_nonfinite=False, max_steps=3)
    module = Overflowing("step", 3)
    run.fit(module, loader(8))
    run.save_checkpoint(tmp_path / "three.ckpt")
    resumed = Overflowing("step", 3)
    resumed.rates = list(module.rates)
    trainer(precision="16-mixed", detect_nonfinite=False).fit(resumed, loader(8), ckpt_path=tmp_path / "three.ckpt")
    assert resumed.rates == [1.0] * 5 + [0.5] * 3


def test_an_epoch_whose_last_step_is_skipped_moves_the_schedule_of_epochs() -> None:
    module = Overflowing("epoch")
    with pytest.warns(UserWarning, match=r"lr_scheduler\.step\(\)` before `optimizer\.step"):
        trainer(precision="16-mixed", detect_nonfinite=False, max_epochs=2).fit(module, loader(2))
    assert module.rates == [1.0, 1.0, 0.5, 0.5]


class Watching(Validated):
    """A scheduler halves the rate where a value has not become better."""

    def __init__(self, monitor: str, **options: Any) -> None:
        super().__init__()
        self.options = {"monitor": monitor, **options}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, **self.options}}


@pytest.mark.parametrize("every", [1, 3])
def test_a_plateau_waits_for_a_value_that_is_validated_rarely(every: int) -> None:
    run = trainer(max_epochs=6, check_val_every_n_epoch=every, num_sanity_val_steps=0)
    run.fit(Watching("value"), loader(2), loader(1))
    validations = 6 // every
    assert run.optimizers[0].param_groups[0]["lr"] == 1e-3 * 0.5 ** (validations - 1)


@pytest.mark.parametrize("strict", [True, False])
def test_a_plateau_of_steps_waits_for_the_first_value_alone(strict: bool) -> None:
    run = trainer(max_epochs=2, num_sanity_val_steps=0)
    run.fit(Watching("value", interval="step", frequency=2, strict=strict), loader(4), loader(1))
    # Nothing before the first validation, the best value behind it, and two steps of the second epoch with that one.
    assert run.optimizers[0].param_groups[0]["lr"] == 1e-3 * 0.25


def test_a_plateau_of_a_value_that_no_validation_logs_is_an_error() -> None:
    run = trainer(max_epochs=6, check_val_every_n_epoch=2, num_sanity_val_steps=0)
    with pytest.raises(
        ConfigurationError, match="monitors 'valeu', but no such value was logged; did you mean 'value'"
    ):
        run.fit(Watching("valeu"), loader(2), loader(1))
    assert run.current_epoch == 1


@pytest.mark.parametrize("evaluate", ["validate", "test"])
def test_an_evaluation_with_ckpt_path_logs_at_the_step_of_the_checkpoint(evaluate: str, tmp_path: Path) -> None:
    fit = trainer(max_epochs=2)
    fit.fit(Small(), loader(4))
    fit.save_checkpoint(path := tmp_path / "a.ckpt")
    run = trainer(logger=CSVLogger(tmp_path / "logs", name="", version=""))
    getattr(run, evaluate)(Validated(), loader(2), ckpt_path=path, verbose=False)
    (row,) = csv.DictReader((tmp_path / "logs" / "metrics.csv").read_text().splitlines())
    assert int(row["step"]) == 8
    assert run.global_step == 0


class TwoLoaders(Small):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.mean(batch)
        self.log("mean", self.mean)

    def on_validation_epoch_end(self) -> None:
        self.at_the_end = self.mean.compute()


def test_a_metric_that_several_loaders_log_has_a_value_of_each_loader() -> None:
    numbers = [DataLoader(torch.arange(count, dtype=torch.float32) + count) for count in (2, 5, 9)]
    module = TwoLoaders()
    values = trainer().validate(module, numbers, verbose=False)
    found = {name: value for each in values for name, value in each.items()}
    assert found == {"mean/dataloader_idx_0": 2.5, "mean/dataloader_idx_1": 7.0, "mean/dataloader_idx_2": 13.0}
    assert module.at_the_end == 13.0


@pytest.mark.parametrize(("window", "is_named"), [(3, False), (4, True)])
def test_accumulation_beyond_an_epoch_steps_once_in_it_and_warns(
    window: int, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        run = trainer(max_epochs=2, accumulate_grad_batches=window)
        run.fit(Small(), loader(3))
    assert run.global_step == 2
    named = [message for message in caplog.messages if f"accumulate_grad_batches={window}, but" in message]
    assert len(named) == (1 if is_named else 0)


def test_an_epoch_that_is_too_short_for_values_of_steps_is_named(tmp_path: Path) -> None:
    """Not without a logger, nor in a trial run: a warning would be an error here."""
    logger = CSVLogger(tmp_path)
    trainer(log_every_n_steps=4).fit(Small(), loader(3))
    trainer(logger=logger, log_every_n_steps=3).fit(Small(), loader(3))
    trainer(logger=logger, log_every_n_steps=4, fast_dev_run=2).fit(Small(), loader(3))
    with pytest.warns(UserWarning, match="3 batches, fewer than log_every_n_steps=4"):
        trainer(logger=logger, log_every_n_steps=4).fit(Small(), loader(3))


class Averaged(Small):
    """The loss of the named batches overflows in float16; steps are automatic, or taken by hand with two optimisers."""

    def __init__(self, overflows: tuple[int, ...], *, by_hand: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.overflows = overflows
        self.fused = fused
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch).float() * (1e30 if batch_idx in self.overflows else 1e-3)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        groups = [self.parameters()] if self.automatic_optimization else [[weight] for weight in self.parameters()]
        return [torch.optim.SGD(group, lr=1.0, fused=self.fused) for group in groups]


class Weights(Callback):
    """Notes the weights of each batch in which a step was taken."""

    def __init__(self) -> None:
        self.taken: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        window = trainer.accumulate_grad_batches
        first = batch_idx // window * window
        ends = (batch_idx + 1) % window == 0 or batch_idx + 1 == trainer.num_training_batches
        if ends and not any(first <= overflow <= batch_idx for overflow in pl_module.overflows):
            self.taken.append(pl_module.layer.weight.detach().clone())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("by_hand", "window"), [(False, 1), (False, 2), (True, 1)])
def test_a_step_that_the_scaler_skips_is_not_averaged(by_hand: bool, fused: bool, window: int) -> None:
    weights, module = Weights(), Averaged((0, 3, 6), by_hand=by_hand, fused=fused)
    options = {"precision": "16-mixed", "detect_nonfinite": False, "accumulate_grad_batches": window}
    trainer(max_epochs=2, callbacks=[WeightAveraging(), weights], **options).fit(module, loader(7))
    assert len(weights.taken) == (8 if window == 1 else 2)
    expected = torch.stack(weights.taken).mean(0)
    torch.testing.assert_close(module.layer.weight.detach(), expected, rtol=1e-6, atol=0)
