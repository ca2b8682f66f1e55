"""The GAN from the command line: a picture at the end of each epoch, from the digits and from MNIST's files."""

from pathlib import Path

import pytest
import torch

from tests.examples.idx_files import write_idx

CONF = Path(__file__).parents[2] / "examples" / "gan" / "conf"
QUICK = ("module.channels=2", "trainer.enable_progress_bar=false", "~callbacks.memory_logger")


@pytest.mark.thorough
@pytest.mark.whole_package
def test_digits(equipoise, tmp_path, monkeypatch):
    monkeypatch.chdir(CONF.parent)
    code, _, err = equipoise(
        *("fit", *QUICK, "data.batch_size=512", "trainer.max_epochs=10", "trainer.log_every_n_steps=1"),
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    assert code == 0, err
    pictures = sorted(path.name for path in (tmp_path / "run" / "samples").iterdir())
    assert pictures == ["epoch009.png"]
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.thorough
def test_mnist(equipoise, tmp_path):
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", torch.randint(256, (70, 28, 28)))
    write_idx(tmp_path / "train-labels-idx1-ubyte", torch.arange(70) % 10)
    code, _, err = equipoise(
        *("fit", "--config-dir", str(CONF), "experiment=mnist", *QUICK, f"data.root={tmp_path}"),
        *("trainer.max_epochs=1", "trainer.log_every_n_steps=1"),
    )
    assert code == 0, err
    (picture,) = Path().glob("outputs/*/*/samples/*.png")
    assert picture.name == "epoch000.png"
