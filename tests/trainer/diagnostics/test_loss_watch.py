"""A loss that is not finite, and a step that never returns one, are reported once."""

import math
import multiprocessing
import threading
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import Trainer
from equipoise.trainer.diagnostics.loss_watch import LossWatch
from tests.support import trainer_runs
from tests.support.surroundings import threads_that_stay


class Poisoned(L.LightningModule):
    """A network whose numbers turn bad at a chosen batch of the first epoch.

    Args:
        where: "batch", "layer", "parameter", "between", "loss" or None.
        at: The number of the batch.
        value: The bad number.
    """

    def __init__(self, where: str | None, at: int = 2, value: float = math.nan) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.spoil, self.head = Spoil(), nn.Linear(4, 1)
        self.where, self.at, self.value = where, at, value

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        def bad(where: str) -> float:
            is_now = batch_idx == self.at and self.trainer.current_epoch == 0
            return self.value if is_now and where == self.where else 0.0

        if bad("batch"):
            batch[0, 0] = self.value
        self.head.bias.data += bad("parameter")
        self.spoil.value = bad("layer")
        hidden = self.spoil(self.encoder(batch)) + bad("between")
        return self.head(hidden).square().mean() + bad("loss")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Spoil(nn.Module):
    value = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.value


def loader(batches: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.randn(2 * batches, 3, generator=torch.Generator().manual_seed(1)), batch_size=2)


def trainer(**options: Any) -> Trainer:
    run: Trainer = trainer_runs.trainer(**{"max_epochs": 2, **options})
    return run


def reports(module: L.LightningModule, **options: Any) -> list[str]:
    """Train; return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(**options).fit(module, loader())
    return [str(warning.message) for warning in caught if "An epoch has" not in str(warning.message)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_nan_or_infinite_is_reported_once_with_step_and_batch(value: float) -> None:
    (report,) = reports(Poisoned("loss", value=value))
    place = "step 2, batch 2 of epoch 0 (counted from 0)"
    assert report.startswith(f"The loss is {value} in {place}. The batch is finite.")
    assert "Trainer(detect_nonfinite=True)" in report


@pytest.mark.parametrize("detect", [None, True])
def test_a_batch_that_is_not_finite_is_named(detect: bool | None) -> None:
    (report,) = reports(Poisoned("batch"), detect_nonfinite=detect)
    assert report.endswith("(counted from 0). The batch itself is not finite: batch.")


CAUSES = {
    "layer": "came from 'spoil' (Spoil); its input and its parameters were finite.",
    "parameter": "came from 'head' (Linear); its parameters were not finite any more, so an earlier step spoiled them.",
    "between": (
        "came from 'head' (Linear); its input was not finite either, so an operation between two modules made it so."
    ),
    "loss": "All outputs of modules were finite, so the loss itself is the cause.",
}


@pytest.mark.parametrize("where", CAUSES)
def test_detect_nonfinite_names_the_first_module_whose_output_is_not_finite(where: str) -> None:
    (report,) = reports(Poisoned(where), detect_nonfinite=True)
    assert report.endswith(CAUSES[where])


def test_detect_nonfinite_names_that_module_under_dp() -> None:
    (report,) = reports(Poisoned("layer"), detect_nonfinite=True, strategy="dp", devices=["cpu", "cpu"])
    assert "Spoil" in report


class Failing(Poisoned):
    """Fails behind a loss that may be bad and still on its way."""

    def on_train_batch_end(self, *_: Any) -> None:
        raise KeyError("on purpose")


def test_no_hook_stays_behind() -> None:
    hooks = nn.modules.module._global_forward_hooks
    before = dict(hooks)
    assert not reports(Poisoned(None), detect_nonfinite=True)
    assert dict(hooks) == before

    with pytest.raises(KeyError, match="on purpose"):
        trainer(detect_nonfinite=True).fit(Failing(None), loader())
    assert dict(hooks) == before


def test_nothing_is_reported_where_the_loss_is_not_looked_at() -> None:
    assert not reports(Poisoned("loss"), detect_nonfinite=False)
    assert not reports(Poisoned("loss"), barebones=True)


@pytest.fixture
def not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are read later, as from a GPU."""
    monkeypatch.setattr(LossWatch, "_check_now", LossWatch._check_later)


@pytest.mark.usefixtures("not_waited_for")
def test_a_loss_on_a_device_is_looked_at_without_waiting() -> None:
    """Without a GPU only the choice of the moment can be tested: the loss of each second batch is looked at."""
    (report,) = reports(Poisoned("loss"), log_every_n_steps=2)
    assert report.startswith(
        "The loss is nan in step 2, batch 2 of epoch 0 (counted from 0). The loss is looked at every 2"
    )
    assert not reports(Poisoned("loss", at=1), log_every_n_steps=2, max_epochs=1)


@pytest.mark.usefixtures("not_waited_for")
def test_the_last_loss_is_read_when_the_fit_ends() -> None:
    (report,) = reports(Poisoned("loss", at=3), log_every_n_steps=1, max_epochs=1)
    assert "step 3, batch 3" in report


@pytest.mark.usefixtures("not_waited_for")
def test_a_report_that_is_an_error_keeps_nothing_from_being_released() -> None:
    data = DataLoader(torch.randn(8, 3), batch_size=2, num_workers=1, persistent_workers=True)
    run = trainer(strategy="dp", devices=["cpu", "cpu"], log_every_n_steps=1)
    known = set(threading.enumerate())
    with pytest.raises(KeyError, match="on purpose") as raised:
        run.fit(Failing("loss", at=0), data)
    assert "Releasing failed as well: UserWarning: The loss is nan in step 0" in raised.value.__notes__[-1]
    assert not multiprocessing.active_children()
    assert not threads_that_stay(known, daemons=True)


# A step without a loss


class Skips(Poisoned):
    """Returns None for chosen batches.

    Args:
        batches: Their numbers.
    """

    def __init__(self, *batches: int) -> None:
        super().__init__(None)
        self.batches = batches

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in self.batches else loss


@pytest.mark.parametrize("strategy", ["single_device", "dp"])
def test_a_step_that_always_returns_none_is_reported(strategy: str) -> None:
    devices = ["cpu"] * (2 if strategy == "dp" else 1)
    (report,) = reports(Skips(0, 1, 2, 3), strategy=strategy, devices=devices)
    assert report.startswith("`training_step` returned None for every batch so far, so nothing was trained.")


def test_a_step_that_returns_none_in_a_long_epoch() -> None:
    """The epoch's end is not waited for."""
    at: list[int] = []

    class Notes(Skips):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            at.append(batch_idx)

    with pytest.raises(UserWarning, match="returned None for every batch so far"):
        trainer().fit(Notes(*range(12)), DataLoader(torch.ones(12, 3)))
    assert at == list(range(10))


@pytest.mark.parametrize(("skipped", "window"), [((1, 2, 3), 1), ((0,), 1), ((0, 1), 2)])
def test_steps_that_return_none_now_and_then_are_not_reported(skipped: tuple[int, ...], window: int) -> None:
    assert not reports(Skips(*skipped), accumulate_grad_batches=window)
