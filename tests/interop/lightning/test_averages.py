"""Averages of the weights on one device: their precision, and their resumption within an epoch."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Trainer


class Net(L.LightningModule):
    """Four steps in an epoch; the statistics of batches are averaged in an epoch of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def loader() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(16, 3, generator=draw), torch.randn(16, 1, generator=draw)), 4)


class SavesAt(Callback):
    """Saves a checkpoint after a batch."""

    def __init__(self, path: Path, epoch: int, batch: int) -> None:
        self.path = path
        self.place = (epoch, batch)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == self.place and not self.path.exists():
            trainer.save_checkpoint(self.path)


def fit(
    *callbacks: Callback, ckpt_path: Path | None = None, precision: Any = "32-true", epochs: int = 4, **options: Any
) -> Net:
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", precision=precision, callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    module = Net()
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return module


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("strategy", ["linear", "cos"])
@pytest.mark.parametrize("place", [(0, 1), (1, 1), (2, 2), (4, 1)], ids=str)
def test_stochastic_averaging_goes_on_within_an_epoch(place: tuple[int, int], strategy: Any, tmp_path: Path) -> None:
    """Before the first average, in the epochs of averages, and in that of the statistics."""
    path = tmp_path / "saved.ckpt"

    def average() -> Callback:
        return StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=2, annealing_strategy=strategy)

    undisturbed = fit(average(), SavesAt(path, *place)).state_dict()
    resumed = fit(average(), ckpt_path=path).state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in undisturbed.items())


class Never(WeightAveraging):
    """Its average is never updated."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return False


class Validated(Callback):
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
            assert_equal(module.state_dict(), self.trained)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)
        assert_equal(torch.load(self.path)["state_dict"], self.trained)


def assert_equal(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(value, expected[name]) for name, value in state.items())


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (EMAWeightAveraging, {"update_starting_at_step": 1000}),
        (EMAWeightAveraging, {"update_every_n_steps": 0, "update_starting_at_epoch": 9}),
        (Never, {}),
    ],
)
def test_before_its_start_an_average_is_the_trained_weights(
    cls: Any, options: Any, use_buffers: bool, tmp_path: Path
) -> None:
    watch = Validated(tmp_path / "saved.ckpt")
    module = fit(cls(use_buffers=use_buffers, **options), watch, epochs=2)
    assert watch.validations == 8
    assert_equal(module.state_dict(), fit(epochs=2).state_dict())
    # Files of such a run are those of any other.
    resumed = fit(cls(use_buffers=use_buffers, **options), ckpt_path=watch.path, epochs=3)
    assert_equal(resumed.state_dict(), fit(epochs=3).state_dict())


@pytest.mark.parametrize("place", [(0, 1), (1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "options", [{"update_starting_at_step": 6}, {"update_every_n_steps": 0, "update_starting_at_epoch": 1}]
)
def test_an_average_begins_with_the_weights_of_its_start(options: Any, place: Any, tmp_path: Path) -> None:
    """The validations before it leave no trace, nor does a resumption before or after it."""

    path = tmp_path / "saved.ckpt"
    expected = fit(EMAWeightAveraging(decay=0.5, **options), limit_val_batches=0).state_dict()
    assert_equal(fit(EMAWeightAveraging(decay=0.5, **options), SavesAt(path, *place)).state_dict(), expected)
    assert_equal(fit(EMAWeightAveraging(decay=0.5, **options), ckpt_path=path).state_dict(), expected)


class OddWeights(Callback):
    """Gives the weights values that float32 does not have, and looks whether a validation keeps them."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        weight = module.net[0].weight
        assert not torch.equal(weight, weight.float().double())


def test_an_average_has_double_precision_where_the_module_has_it(tmp_path: Path) -> None:
    """One in float32 would round the weights, with which it is exchanged for a validation."""
    module = fit(EMAWeightAveraging(decay=0.5), OddWeights(), precision="64-true", epochs=1)
    weight = module.net[0].weight
    assert weight.dtype == torch.float64
    assert not torch.equal(weight, weight.float().double())
