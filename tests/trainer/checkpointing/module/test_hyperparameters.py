"""Hyperparameters that hold the module's network are written as they were before the module was placed."""

import threading
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import CheckpointError, FSDPStrategy, Trainer
from tests.support.trainer_runs import trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:Attribute '.*' is an instance of `nn.Module`", "ignore:The checkpoint holds states of callbacks"
)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * self.layers(features)


class WithNetwork(L.LightningModule):
    """As projects of lightning-hydra-template write it."""

    def __init__(self, net: nn.Module, others: list[nn.Module], lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net
        self.others = nn.ModuleList(others)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.net(batch)
        for other in self.others:
            hidden = other(hidden)
        return hidden.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def module() -> WithNetwork:
    torch.manual_seed(1)
    return WithNetwork(Network(), [nn.Linear(1, 1)])


def batches() -> Any:
    return DataLoader(torch.linspace(-1, 1, 32).reshape(8, 4), batch_size=4)


def fit(folder: Path, **options: Any) -> Path:
    keeper = ModelCheckpoint(folder, "a")
    trainer(Trainer, callbacks=[keeper], enable_checkpointing=True, **options).fit(module(), batches())
    return folder / "a.ckpt"


def structure_of(network: nn.Module) -> list[Any]:
    return [(name, type(part), sorted(vars(part))) for name, part in network.named_modules()]


def check_file(path: Path) -> None:
    content = torch.load(path, weights_only=False)
    hyperparameters = content["hyper_parameters"]
    assert list(hyperparameters) == ["net", "others", "lr"]
    for prefix, network, original in (
        ("net.", hyperparameters["net"], Network()),
        ("others.0.", hyperparameters["others"][0], nn.Linear(1, 1)),
    ):
        assert structure_of(network) == structure_of(original)
        for name, value in network.state_dict().items():
            stored = content["state_dict"][prefix + name]
            assert torch.equal(value, stored)
            assert value.data_ptr() == stored.data_ptr()  # it is in the file once
        for parameter in network.parameters():
            assert type(parameter) is nn.Parameter
    assert hyperparameters["net"].scale == 2.0
    loaded = WithNetwork.load_from_checkpoint(path, weights_only=False)
    assert loaded.net(torch.ones(1, 4)).shape == (1, 1)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("single_device", 1),
        ("dp", 2),
        ("fsdp", 2),
        pytest.param("ddp_spawn", 2, marks=pytest.mark.slow),
        pytest.param("balanced", 2, marks=pytest.mark.slow),
        pytest.param("pipeline", 2, marks=pytest.mark.slow),
    ],
)
def test_under_each_strategy(tmp_path: Path, strategy: str, devices: int) -> None:
    check_file(fit(tmp_path, strategy=strategy, devices=devices))


def test_with_activations_computed_again(tmp_path: Path) -> None:
    check_file(fit(tmp_path, activation_checkpointing=["net.layers.0"]))


@pytest.mark.slow
def test_a_folder_of_shards_leaves_networks_out(tmp_path: Path) -> None:
    with pytest.raises(UserWarning, match=r"\['net', 'others'\] are networks, which a sharded checkpoint leaves out"):
        fit(tmp_path / "warned", strategy=FSDPStrategy(checkpoints="sharded"), devices=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The hyperparameters")
        path = fit(tmp_path / "sharded", strategy=FSDPStrategy(checkpoints="sharded"), devices=2)
    assert path.is_dir()
    whole = fit(tmp_path / "whole", strategy="fsdp", devices=2)
    loaded = WithNetwork(Network(), [nn.Linear(1, 1)])
    trainer(max_epochs=1).fit(loaded, batches(), ckpt_path=path)
    expected = torch.load(whole, weights_only=False)["state_dict"]
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_a_network_that_cannot_be_copied_stays_as_it_is(tmp_path: Path) -> None:
    run = trainer(activation_checkpointing=["net.layers.0"])
    locked = module()
    locked.net.lock = threading.Lock()
    run.fit(locked, batches())
    with pytest.raises(CheckpointError, match=r"\['net'\], a Network, cannot be pickled"):
        run.save_checkpoint(tmp_path / "a.ckpt")
