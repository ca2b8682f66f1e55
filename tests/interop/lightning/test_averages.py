"""Averages of the weights on one device: their precision, and their resumption within an epoch."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn

from tests.support.equality import assert_equal
from tests.support.resumption import SavesInHooks, assert_resumes
from tests.support.trainer_runs import Validated, loader, trainer


class Net(Validated):
    """The statistics of batches are averaged in an epoch of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def fit(*callbacks: Callback, ckpt_path: Path | None = None, epochs: int = 4, **options: Any) -> Net:
    """Train with four steps in an epoch."""
    module = Net()
    run = trainer(max_epochs=epochs, callbacks=list(callbacks), **options)
    run.fit(module, loader(4), loader(4), ckpt_path=ckpt_path)
    return module


@cache
def plain(epochs: int) -> Net:
    """The module that is trained without an average."""
    return fit(epochs=epochs)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("batch", "strategy"),
    [(6, "cos"), (11, "linear"), (18, "cos")],
    ids=["just before the first average", "in the epochs of averages", "in that of the statistics"],
)
def test_stochastic_weight_averaging_continues_within_an_epoch(batch: int, strategy: Any, tmp_path: Path) -> None:
    def run(callbacks: list[Callback], path: Path | None) -> Net:
        average = StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=2, annealing_strategy=strategy)
        return fit(average, *callbacks, ckpt_path=path)

    assert_resumes(run, tmp_path, ["on_train_batch_end"], calls=[batch])


class ComparesValidated(Callback):
    """Compares the state that is validated with the trained one, and the states in a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trained: dict[str, Tensor] = {}
        self.validations = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.trained = {name: value.clone() for name, value in module.state_dict().items()}

    def on_validation_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        if self.trained:
            self.validations += 1
            assert_equal(self.trained, dict(module.state_dict()))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)
        assert_equal(self.trained, dict(torch.load(self.path)["state_dict"]))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("average", "use_buffers"),
    [
        (partial(EMAWeightAveraging, update_starting_at_step=1000), True),
        (partial(EMAWeightAveraging, update_every_n_steps=0, update_starting_at_epoch=9), False),
    ],
    ids=["from a step on", "from an epoch on"],
)
def test_before_its_start_an_average_is_the_trained_weights(average: Any, use_buffers: bool, tmp_path: Path) -> None:
    watch = ComparesValidated(tmp_path / "saved.ckpt")
    assert_equal(plain(2), fit(average(use_buffers=use_buffers), watch, epochs=2))
    assert watch.validations == 8
    # Files of such a run are those of any other.
    assert_equal(plain(3), fit(average(use_buffers=use_buffers), ckpt_path=watch.path, epochs=3))


AT_STEP = partial(EMAWeightAveraging, decay=0.5, update_starting_at_step=6)
AT_EPOCH = partial(EMAWeightAveraging, decay=0.5, update_every_n_steps=0, update_starting_at_epoch=1)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("average", "batch"),
    [(AT_STEP, 2), (AT_STEP, 8), (AT_EPOCH, 2), (AT_EPOCH, 11)],
    ids=["before its step", "after its step", "before its epoch", "after its epoch"],
)
def test_an_average_begins_with_the_weights_of_its_start(average: Any, batch: int, tmp_path: Path) -> None:
    """The validations before it leave no trace, nor does a resumption before or after it."""
    saves = SavesInHooks(tmp_path, ["on_train_batch_end"], [batch])
    expected = fit(average(), limit_val_batches=0)
    assert_equal(expected, fit(average(), saves))
    assert_equal(expected, fit(average(), ckpt_path=saves.saved[0].path))


class OddWeights(Callback):
    """Gives the weights values that float32 does not have, and looks whether a validation keeps them."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        weight = module.layer[0].weight
        assert not torch.equal(weight, weight.float().double())


def test_weight_averaging_with_64_true_averages_in_float64(tmp_path: Path) -> None:
    """One in float32 would round the weights, with which it is exchanged for a validation."""
    module = fit(EMAWeightAveraging(decay=0.5), OddWeights(), precision="64-true", epochs=1)
    weight = module.layer[0].weight
    assert weight.dtype == torch.float64
    assert not torch.equal(weight, weight.float().double())
