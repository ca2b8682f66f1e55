"""A model of transformers whose loss is its own: trained, frozen but for its head, and on two devices."""

import csv
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'equipoise[transformers]'")

CONF = Path(__file__).parents[2] / "examples" / "finetune_transformers" / "conf"
QUICK = ["trainer.enable_progress_bar=false", "trainer.log_every_n_steps=1", "trainer.limit_val_batches=2"]
QUICK += ["trainer.max_epochs=1", "trainer.limit_train_batches=3"]


def fit(equipoise, *overrides):
    code, out, err = equipoise("fit", "--config-dir", str(CONF), "trainer.enable_progress_bar=false", *overrides)
    assert code == 0, err
    return out


def logged(folder, name):
    """The values of a column, in order, of the newest run."""
    path = max(folder.glob("outputs/*/*/metrics.csv"))
    with path.open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@pytest.mark.slow
def test_it_tells_two_kinds_of_documentation_apart(empty_folder, equipoise):
    out = fit(equipoise, "trainer.max_epochs=2")
    assert "203,458 of 203,458 parameters train" in out
    assert logged(empty_folder, "val_accuracy")[-1] > 0.8


@pytest.mark.thorough
def test_the_head_alone(empty_folder, equipoise):
    out = fit(equipoise, "module.head_only=true", *QUICK)
    # Two linear layers: 64 * 64 + 64 and 64 * 2 + 2.
    assert "4,290 of 203,458 parameters train" in out


@pytest.mark.slow
def test_two_devices_compute_as_one(empty_folder, equipoise):
    dropouts = ("dropout", "attention_dropout", "seq_classif_dropout")
    changes = [*(f"+module.settings.{name}=0" for name in dropouts), "precision=64-true"]
    fit(equipoise, *changes, *QUICK)
    expected = logged(empty_folder, "train_loss")
    assert len(expected) == 3
    for strategy in (["strategy=dp"], ["strategy=balanced", "strategy.shares=[1,3]"]):
        fit(equipoise, *changes, *QUICK, *strategy, "trainer.devices=[cpu,cpu]")
        assert logged(empty_folder, "train_loss") == pytest.approx(expected, rel=1e-10), strategy


@pytest.mark.slow
def test_batches_by_tokens_on_two_processes(empty_folder, equipoise):
    fit(equipoise, "data.max_tokens=512", *QUICK, "strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu")
    assert len(logged(empty_folder, "train_loss")) == 3
