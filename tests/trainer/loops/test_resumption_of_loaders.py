"""A resumed run reads its loaders on as the killed one would have, with workers that live longer than an epoch, too."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.trainer_runs import trainer
from tests.trainer.loops.test_resumption import SaveEverywhere

pytestmark = pytest.mark.filterwarnings("ignore:The val loader shuffles", "ignore:.*`overfit_batches`")

SAMPLES = 12


def rows() -> TensorDataset:
    """Samples that are told apart by their value."""
    return TensorDataset(torch.arange(SAMPLES, dtype=torch.float64).unsqueeze(1))


class Module(L.LightningModule):
    """Notes the samples it sees, in training and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1).double()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = batch if isinstance(batch[0], list) else [batch]
        self.seen.append([each[0].flatten().int().tolist() for each in batches])
        noise = torch.randn(1, dtype=torch.float64)
        return sum(self.layer(each[0] / SAMPLES + noise).square().mean() for each in batches)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if not self.trainer.sanity_checking:
            self.seen.append(["val", batch[0].flatten().int().tolist()])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def persistent(**options: Any) -> DataLoader[Any]:
    """A loader whose worker lives as long as the run."""
    return DataLoader(rows(), batch_size=4, num_workers=1, persistent_workers=True, **options)


def one(**options: Any) -> dict[str, Any]:
    """Training loaders: one."""
    return {"train_dataloaders": persistent(shuffle=True, **options)}


def own_generator() -> dict[str, Any]:
    """Training loaders: one that draws order and seeds from a generator of its own."""
    return one(generator=torch.Generator().manual_seed(4))


def together() -> dict[str, Any]:
    """Training loaders: two that are read together, the second without workers."""
    return {"train_dataloaders": [persistent(shuffle=True), DataLoader(rows(), batch_size=6, shuffle=True)]}


def validated() -> dict[str, Any]:
    """Training without workers, validation with workers that stay."""
    return {
        "train_dataloaders": DataLoader(rows(), batch_size=4, shuffle=True),
        "val_dataloaders": [persistent(shuffle=True), persistent()],
    }


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one": (one, {}),
    "own-generator": (own_generator, {}),
    "together": (together, {}),
    "validated": (validated, {}),
    "validated-without-sanity-check": (validated, {"num_sanity_val_steps": 0}),
    "validated-seldom": (validated, {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}),
    "asked-for-again": (one, {"reload_dataloaders_every_n_epochs": 2}),
}


def fit(make: Any, callbacks: list[Any], path: Path | None = None, seed: int = 1, **options: Any) -> Module:
    """Trains for three epochs."""
    torch.manual_seed(0)
    module = Module()
    torch.manual_seed(seed)

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return make()["train_dataloaders"]

        def val_dataloader(self) -> Any:
            return make()["val_dataloaders"]

    if "val_dataloaders" not in make():
        options["limit_val_batches"] = 0
    trainer(max_epochs=3, callbacks=callbacks, **options).fit(module, datamodule=Data(), ckpt_path=path)
    return module


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_persistent_workers(name: str, tmp_path: Path) -> None:
    """Every sample once per epoch, in the order of the undisturbed run, from whichever hook the run continues."""
    make, options = CASES[name]
    saver = SaveEverywhere(
        tmp_path, ("on_train_epoch_start", "on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end")
    )
    expected = fit(make, [saver], **options)
    for path, _ in saver.saved[:: 3 if len(saver.saved) > 12 else 2]:
        resumed = fit(make, [], path, seed=99, **options)
        assert resumed.seen == expected.seen, path.name
        assert torch.equal(resumed.layer.weight, expected.layer.weight), path.name


def test_seeds_of_persistent_workers(tmp_path: Path) -> None:
    """The workers of a resumed run have the seeds they had, wherever their data comes from them."""

    class Seeds(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            info = torch.utils.data.get_worker_info()
            assert info is not None
            return (torch.tensor([float(info.seed % 1000)], dtype=torch.float64),)

    def make() -> dict[str, Any]:
        loader = DataLoader(Seeds(*rows().tensors), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
        return {"train_dataloaders": loader}

    saver = SaveEverywhere(tmp_path, ("on_train_epoch_end",))
    expected = fit(make, [saver])
    path, _ = saver.saved[0]
    assert fit(make, [], path, seed=99).seen == expected.seen
