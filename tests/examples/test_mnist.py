"""MNIST, on files in its format made from other digits, and on the real ones where there are any."""

import csv
import os
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from tests.examples.idx_files import write_idx

ROOT = Path(__file__).parents[2]
CONF = ROOT / "examples" / "mnist" / "conf"
REAL = Path(os.environ.get("EQUIPOISE_TEST_DATA", "")) / "mnist"


@pytest.fixture
def folder(tmp_path):
    """scikit-learn's digits, 8 by 8, drawn three times as large in the middle of 28 by 28."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).mul(255 / 16).repeat_interleave(3, 1).repeat_interleave(3, 2)
    images, labels = torch.nn.functional.pad(images, (2, 2, 2, 2)), torch.from_numpy(digits.target)
    folder = tmp_path / "data"
    folder.mkdir()
    write_idx(folder / "train-images-idx3-ubyte", images[:1400])
    write_idx(folder / "train-labels-idx1-ubyte.gz", labels[:1400])
    write_idx(folder / "t10k-images-idx3-ubyte.gz", images[1400:])
    write_idx(folder / "t10k-labels-idx1-ubyte", labels[1400:])
    return folder


def last_row():
    (metrics,) = Path().glob("outputs/*/*/metrics.csv")
    with metrics.open() as file:
        return [row for row in csv.DictReader(file) if row.get("test_loss") or row.get("val_loss")][-1]


@pytest.mark.slow
def test_from_a_folder_of_idx_files(folder, equipoise):
    code, _, _ = equipoise(
        *("fit", "--config-dir", str(CONF), f"data.root={folder}", "data.val_images=100", "data.batch_size=64"),
        *("trainer.enable_progress_bar=false", "trainer.log_every_n_steps=10"),
    )
    assert code == 0
    assert float(last_row()["test_accuracy"]) > 0.85


@pytest.mark.thorough
def test_the_folder_must_be_named(equipoise):
    code, _, err = equipoise("fit", "--config-dir", str(CONF))
    assert code == 2
    assert "data.root must be given a value" in err


@pytest.mark.skipif(not REAL.is_dir(), reason="EQUIPOISE_TEST_DATA names no folder with mnist/ in it")
def test_real_images(equipoise):
    code, _, _ = equipoise(
        *("fit", "--config-dir", str(CONF), f"data.root={REAL}", "trainer.enable_progress_bar=false"),
        *("trainer.max_epochs=1", "trainer.limit_train_batches=100", "trainer.limit_val_batches=1"),
        "trainer.limit_test_batches=3",
    )
    assert code == 0
    assert float(last_row()["test_accuracy"]) > 0.9
