"""BERT: the same numbers on several devices, and a training that predicts more than frequencies."""

import csv
from pathlib import Path

import pytest
import torch

from equipoise import BalancedDataParallelStrategy, DataParallelStrategy, Trainer
from tests.support.quiet import QUIET

EXAMPLE = Path(__file__).parents[2] / "examples" / "bert"
CONF = EXAMPLE / "conf"

SMALL = {"vocabulary": 60, "hidden": 16, "layers": 2, "heads": 2, "length": 19, "dropout": 0.0, "warmup": 2}

# A small language: two nouns of one kind stand around each verb, so masked words follow from their neighbours.
NOUNS = [f"{kind}{number}" for kind in "abcd" for number in range(4)]
TEXTS = {"train": 600, "val": 150}


@pytest.fixture
def bert(monkeypatch):
    """The modules of the example, importable as from its folder."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from bert.data import TextDataModule
    from bert.module import BERT

    return BERT, TextDataModule


@pytest.fixture
def folder(tmp_path):
    """Texts of the language, in which each line has two sentences about one kind of nouns."""
    folder = tmp_path / "data"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name, lines in TEXTS.items():
        text = [line(*torch.randint(4, (5,), generator=generator).tolist()) for _ in range(lines)]
        (folder / name).write_text("\n".join(text))
    return folder


def line(kind, *numbers):
    first, second, third, fourth = (NOUNS[4 * kind + number] for number in numbers)
    verb = "abcd"[kind]
    return f"{first} verb{verb} {second} . {third} verb{verb} {fourth} ."


def fit(bert, folder, strategy, devices):
    """Train in float64; return the losses of the steps and the weights."""
    module_class, data_class = bert
    torch.manual_seed(0)
    # Adam would divide the gradient of the keys' bias, which is zero but for rounding, by its own size.
    module = module_class(**SMALL, optimizer="sgd", lr=0.1)
    data = data_class(root=folder, train_file="train", val_file="val", vocabulary=60, length=19, batch_size=30, seed=0)
    losses = []
    module.on_train_batch_end = lambda outputs, batch, batch_idx: losses.append(float(outputs["loss"]))
    trainer = Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        precision="64-true",
        max_steps=4,
        limit_val_batches=2,
        **QUIET,
    )
    trainer.fit(module, datamodule=data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return losses, metrics, torch.nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize(
    "strategy",
    [
        DataParallelStrategy(parallelize="forward", output_device=1),
        BalancedDataParallelStrategy(shares=[1, 3]),
    ],
    ids=["forward, other output", "balanced"],
)
def test_two_devices_compute_as_one(bert, folder, strategy):
    losses, metrics, weights = fit(bert, folder, strategy, ["cpu", "cpu"])
    expected_losses, expected_metrics, expected_weights = fit(bert, folder, "single_device", 1)
    assert len(losses) == 4
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert metrics == pytest.approx(expected_metrics, rel=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-12, atol=1e-14)


def last_metrics(folder):
    (path,) = folder.glob("outputs/*/*/metrics.csv")
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row.get("val_words_loss")][-1]


@pytest.mark.slow
def test_it_predicts_more_than_frequencies(folder, empty_folder, equipoise):
    code, _, err = equipoise(
        *("fit", "--config-dir", str(CONF), "experiment=small", f"data.root={folder}", "data.train_file=train"),
        *("data.val_file=val", "data.vocabulary=60", "data.length=19", "module.hidden=32", "module.warmup=50"),
        *("module.lr=3e-3", "trainer.max_epochs=20", "trainer.log_every_n_steps=10"),
        "trainer.enable_progress_bar=false",
    )
    assert code == 0, err
    metrics = last_metrics(empty_folder)
    assert float(metrics["val_words_loss"]) < float(metrics["val_unigram_loss"]) - 0.5
    # Both losses train: a second sentence about other nouns follows nothing.
    assert float(metrics["val_next_accuracy"]) > 0.7


@pytest.mark.thorough
def test_predictions_are_texts(folder, empty_folder, equipoise):
    code, _, err = equipoise(
        *("predict", "--config-dir", str(CONF), "experiment=small", f"data.root={folder}", "data.train_file=train"),
        *("data.val_file=val", "data.vocabulary=60", "trainer.enable_progress_bar=false"),
    )
    assert code == 0, err
    (path,) = empty_folder.glob("outputs/*/*/predictions.pt")
    texts = [text for batch in torch.load(path, weights_only=True) for text in batch]
    assert len(texts) == TEXTS["val"]
    assert all(text.startswith("<begin> ") and "|" in text for text in texts)


@pytest.mark.slow
def test_without_a_text_it_reads_pythons_documentation(empty_folder, equipoise):
    code, _, err = equipoise(
        *("fit", "--config-dir", str(CONF), "experiment=small", "trainer.enable_progress_bar=false"),
        *("trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1"),
        "trainer.log_every_n_steps=1",
    )
    assert code == 0, err
    assert 5 < float(last_metrics(empty_folder)["val_unigram_loss"]) < 6.5
