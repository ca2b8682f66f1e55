"""Files of weights alone: a format of any package writes and reads those whose names end with its name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging

from equipoise import CheckpointError, ConfigurationError
from equipoise.trainer.checkpointing.module import weight_formats
from equipoise.trainer.checkpointing.module.weight_formats import WeightFormat, format_of
from tests.support.trainer_runs import Small, Validated, loader, refuses, trainer


class Pickled(WeightFormat):
    def write(self, weights: Any, path: Any) -> None:
        torch.save(dict(weights), path)

    def read(self, path: Any) -> Any:
        return torch.load(path)


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Formats that packages offer."""
    formats: dict[str, Any] = {"weights": Pickled}
    monkeypatch.setattr(weight_formats, "names_of_extensions", lambda kind: list(formats))
    monkeypatch.setattr(weight_formats, "load_extension", lambda kind, name: formats[name])
    return formats


class Halved(Small):
    """Writes other weights than it has, and mends those that it reads."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value / 2 for name, value in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value * 2 for name, value in checkpoint["state_dict"].items()}


@pytest.mark.parametrize("kind", [Small, Halved])
def test_a_file_holds_the_weights_alone(kind: type[Small], tmp_path: Path) -> None:
    module = kind()
    run = trainer()
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "x.weights")
    expected = {name: value / (2 if kind is Halved else 1) for name, value in module.state_dict().items()}
    torch.testing.assert_close(torch.load(tmp_path / "x.weights"), expected, rtol=0, atol=0)


class Momentum(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def test_a_fit_begins_anew_with_its_weights(tmp_path: Path) -> None:
    module = Momentum()
    run = trainer(max_epochs=2)
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "x.weights")
    by_hand = Momentum()
    by_hand.load_state_dict(module.state_dict())
    trainer().fit(by_hand, loader())
    continued = Momentum()
    run = trainer()
    run.fit(continued, loader(), ckpt_path=tmp_path / "x.weights")
    assert (run.current_epoch, run.global_step) == (1, 3)
    torch.testing.assert_close(continued.state_dict(), by_hand.state_dict(), rtol=0, atol=0)


def test_averaged_weights_begin_with_it_too(tmp_path: Path) -> None:
    by_hand = Validated()
    run = trainer()
    run.connect_module(by_hand)
    run.save_checkpoint(tmp_path / "x.weights")
    trainer(callbacks=EMAWeightAveraging(decay=0.5)).fit(by_hand, loader(), loader())
    module = Validated()
    run = trainer(callbacks=EMAWeightAveraging(decay=0.5))
    with pytest.warns(UserWarning, match="was not created with WeightAveraging"):
        run.fit(module, loader(), loader(), ckpt_path=tmp_path / "x.weights")
    torch.testing.assert_close(module.state_dict(), by_hand.state_dict(), rtol=0, atol=0)


def test_what_is_refused(tmp_path: Path, offered: dict[str, Any]) -> None:
    run = trainer()
    run.connect_module(Small())
    path = tmp_path / "x.weights"
    refuses(lambda: run.save_checkpoint(path, weights_only=False), "weights alone", error=CheckpointError)
    refuses(lambda: trainer().fit(Small(), loader(), ckpt_path=path), "does not exist", error=CheckpointError)
    offered["other"] = LightningModule
    refuses(lambda: format_of("x.other"), "'other' must be a class of WeightFormat", error=ConfigurationError)
    assert not list(tmp_path.iterdir())
