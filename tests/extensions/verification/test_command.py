"""`equipoise verify` on a project: the table, its JSON, and the exit code."""

import json
from pathlib import Path
from typing import Any

import pytest

from equipoise.__main__ import main
from tests.support.projects import project_in

FILES = {
    "conf/config.yaml": """
        defaults: [equipoise, _self_]
        module: {_target_: verified.Net}
        data: {_target_: verified.Data}
        trainer: {accelerator: cpu, max_epochs: 2}
    """,
    "verified.py": """
        import torch
        from lightning.pytorch import LightningDataModule, LightningModule
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        class Net(LightningModule):
            def __init__(self, wrong: bool = False) -> None:
                super().__init__()
                self.wrong = wrong
                self.layer = nn.Linear(2, 1)

            def training_step(self, batch, batch_idx):
                loss = self.layer(batch[0]).square().mean()
                self.log("loss", loss)
                return loss * (1 + self.wrong * (self.trainer.strategy.devices != self.trainer.strategy.devices[:1]))

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        class Data(LightningDataModule):
            def on_after_batch_transfer(self, batch, dataloader_idx):
                return [features + torch.rand_like(features) for features in batch]

            def train_dataloader(self):
                return DataLoader(TensorDataset(torch.rand(12, 2)), batch_size=4, shuffle=True)
    """,
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path) -> Any:
    with project_in(tmp_path, FILES, "verified"):
        yield tmp_path


def test_the_table_of_a_run_that_is_that_of_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "+module.wrong=false", "strategy=dp", "trainer.devices=[cpu,cpu]", "--steps=4"]) == 0
    *table, sentence = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[1].strip(): line.split() for line in table if line.startswith("  ") and line.strip()}
    assert [rows[kind][-1] != "differs" for kind in ("loss", "gradient", "weight", "logged value")] == [True] * 4
    assert "8" in rows["gradient"]
    assert sentence == "The first 4 optimiser steps are those of one device, within rounding."
    assert not list(Path().glob("outputs*"))


def test_a_difference_is_told_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The loss depends on the number of devices."""
    assert main(["verify", "+module.wrong=true", "strategy=dp", "trainer.devices=[cpu,cpu]", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["equal"]
    assert result["sentence"].startswith("The steps are not those of one device: in step 1 the loss differs by ")
    assert {row["of"]: row["verdict"] for row in result["rows"]}["gradient"] == "differs"


def test_arguments_that_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--steps=0"]) == 2
    assert "--steps takes a whole number from 1" in capsys.readouterr().err
