"""PyramidNet on files in the formats of CIFAR-10 and MNIST, and on MNIST itself where it is at hand."""

import csv
from pathlib import Path

import pytest
import torch

from tests.examples.idx_files import write_idx

CONF = Path(__file__).parents[2] / "examples" / "pyramidnet" / "conf"
SMALL = ("module.alpha=12", "module.units=1", "trainer.enable_progress_bar=false", "~callbacks.memory_logger")


def records(count):
    """CIFAR-10's binary format: a class has a colour, which noise disturbs."""
    labels = torch.arange(count) % 10
    levels = torch.stack([labels * 25, 255 - labels * 25, labels * 25], dim=1).repeat_interleave(1024, dim=1)
    pixels = (levels + torch.randint(-20, 20, levels.shape)).clamp(0, 255)
    return torch.cat([labels.unsqueeze(1), pixels], dim=1).to(torch.uint8).numpy().tobytes()


def last_test_row():
    (metrics,) = Path().glob("outputs/*/*/metrics.csv")
    with metrics.open() as file:
        return [row for row in csv.DictReader(file) if row.get("test_loss")][-1]


@pytest.mark.slow
def test_from_cifar10_s_files(tmp_path, equipoise):
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(1, 6):
        (folder / f"data_batch_{number}.bin").write_bytes(records(60))
    (folder / "test_batch.bin").write_bytes(records(50))
    code, _, err = equipoise(
        *("fit", "--config-dir", str(CONF), *SMALL, f"data.root={folder}", "data.val_images=50"),
        *("data.batch_size=25", "data.workers=0", "trainer.max_epochs=2", "trainer.log_every_n_steps=5"),
    )
    assert code == 0, err
    # Less than the loss of equal probabilities, log(10).
    assert float(last_test_row()["test_loss"]) < 2.2


@pytest.mark.thorough
@pytest.mark.whole_package
def test_from_mnist_s_files(tmp_path, equipoise, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    for part, count in [("train", 90), ("t10k", 30)]:
        write_idx(folder / f"{part}-images-idx3-ubyte", torch.randint(256, (count, 28, 28)))
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", torch.arange(count) % 10)
    monkeypatch.chdir(CONF.parent)
    code, _, err = equipoise(
        *("fit", "experiment=mnist", *SMALL, f"data.root={folder}", "data.val_images=30", "data.batch_size=30"),
        *("trainer.log_every_n_steps=1", f"hydra.run.dir={tmp_path / 'run'}"),
    )
    assert code == 0, err
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.thorough
def test_a_file_of_another_size(tmp_path, equipoise):
    for name in [f"data_batch_{number}.bin" for number in range(1, 6)]:
        (tmp_path / name).write_bytes(bytes(3072))
    code, _, err = equipoise("fit", "--config-dir", str(CONF), *SMALL, f"data.root={tmp_path}")
    assert code == 2
    assert "data_batch_1.bin has 3072 bytes, but CIFAR-10's binary format has 3073 for each image" in err
