"""Files of ModelCheckpoint hold what their names say: weights with their value, and no leftovers of a former run."""

import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import Trainer
from tests.support.pairs import pairwise
from tests.support.trainer_runs import trainer

pytestmark = pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")

BATCHES = 10


class Moving(L.LightningModule):
    """One weight that each step moves by a share of the batch; its value in the validation tells which one it is.

    The value falls and rises again, so that the best weights are not the last ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = -(self.weight * batch.mean())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", value_of(self.weight.detach()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def value_of(weight: Tensor) -> Tensor:
    return (weight - 0.77).abs()


def train(module: Moving, *callbacks: Any, cls: Any = Trainer, ckpt_path: Path | None = None, **options: Any) -> Any:
    """Train with validation; return the trainer."""
    run = trainer(cls, callbacks=list(callbacks), enable_checkpointing=True, **options)
    batches = torch.linspace(0.5, 1.5, BATCHES, dtype=torch.float64)
    run.fit(module, DataLoader(batches), DataLoader(torch.ones(1)), ckpt_path=ckpt_path)
    return run


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def weight_in(path: Any) -> Tensor:
    weight: Tensor = read(path)["state_dict"]["weight"]
    return weight


@pytest.mark.quick_cases(4)
@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("accumulate", "interval", "trigger", "top_k"),
    pairwise(
        [1, 3],
        [1.0, 0.5, 3],
        [{"every_n_train_steps": 1}, {"every_n_train_steps": 2}, {"train_time_interval": timedelta(0)}],
        [-1, 2],
    ),
)
def test_files_by_steps_or_by_time_are_saved_at_the_next_validation_with_its_value(
    tmp_path: Path, accumulate: int, interval: float, trigger: dict[str, Any], top_k: int
) -> None:
    keeper = ModelCheckpoint(tmp_path, "{step}-{value:.6f}", "value", save_top_k=top_k, save_last=True, **trigger)
    train(Moving(), keeper, max_epochs=2, accumulate_grad_batches=accumulate, val_check_interval=interval)
    scores = {path: score.item() for path, score in keeper.best_k_models.items()}
    assert len(scores) == 2 if top_k == 2 else len(scores) >= 2
    for path, score in scores.items():
        assert value_of(weight_in(path)).item() == score
    assert keeper.best_model_score is not None
    assert value_of(weight_in(keeper.best_model_path)) == keeper.best_model_score == min(scores.values())


class StepsAfterTheBatch(Moving):
    """Steps by hand in `on_train_batch_end`."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(-(self.weight * batch.mean()))

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        self.weights = [*getattr(self, "weights", []), self.weight.item()]


def test_a_step_by_hand_in_on_train_batch_end_is_saved_by_every_n_train_steps(tmp_path: Path) -> None:
    module = StepsAfterTheBatch()
    train(module, ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1), limit_val_batches=0)
    for step in (2, 4, 6, 8):
        assert weight_in(tmp_path / f"step={step}.ckpt") == module.weights[step - 1]


class Steps(L.Callback):
    """Notes the step of the last file after each batch."""

    def __init__(self, folder: Path) -> None:
        self.last = folder / "last.ckpt"
        self.steps: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        if self.last.exists():
            self.steps.append(read(self.last)["global_step"])


def test_the_last_file_does_not_wait_for_the_validation(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, "{step}", "value", every_n_train_steps=2, save_top_k=-1, save_last=True)
    steps = Steps(tmp_path)
    train(Moving(), keeper, steps, max_epochs=2, val_check_interval=5)
    # Before the first batch of the second epoch, and before each of the later ones.
    assert steps.steps[-10:] == [10, 10, 12, 12, 14, 15, 16, 16, 18, 18]
    assert sorted(keeper.best_k_models) == sorted(str(tmp_path / f"step={step}.ckpt") for step in (5, 10, 15, 20))


class Writes(Moving):
    """Notes epoch, step and number of batches of each checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[int, int, int]] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        batch = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]
        self.writes.append((checkpoint["epoch"], checkpoint["global_step"], batch))


def test_the_last_file_is_written_once_for_a_step(tmp_path: Path) -> None:
    """A step of a window is due in each batch of the next window, also in that of the next epoch."""
    keeper = ModelCheckpoint(tmp_path, "{step}", "value", every_n_train_steps=2, save_last=True)
    module = Writes()
    train(module, keeper, max_epochs=2, accumulate_grad_batches=3, check_val_every_n_epoch=2)
    # Four steps in each epoch. The last one is ranked after the validation, with its last file.
    assert module.writes == [(0, 2, 6), (0, 4, 10), (1, 6, 6), (1, 8, 10), (1, 8, 10)]


class Changed(ModelCheckpoint):
    """Counts the batches that end."""

    batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.batches += 1


def test_a_hook_that_a_subclass_has_changed_is_called_in_each_batch(tmp_path: Path) -> None:
    train(Moving(), keeper := Changed(tmp_path, monitor="value", every_n_train_steps=3))
    assert keeper.batches == BATCHES


def test_a_value_of_the_training_is_saved_at_once(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, "{step}", "loss", every_n_train_steps=3, save_top_k=-1)
    train(Moving(), keeper, val_check_interval=3)
    written = read(tmp_path / "step=3.ckpt")["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    assert written["current"]["completed"] == 0, "written after the validation"


# A run that ends anywhere and continues


class Copying(Trainer):
    """Copies the folder of the checkpoints behind each one that it writes."""

    copies: list[tuple[Path, Path]] = []

    def save_checkpoint(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(filepath, *args, **kwargs)
        folder = Path(filepath).parent
        # With the times of the files.
        copy = shutil.copytree(folder, folder.with_name(f"copy-{len(self.copies)}"))
        self.copies.append((Path(filepath), copy))


Keepers = Callable[[Path], list[ModelCheckpoint]]


def last_first(folder: Path) -> list[ModelCheckpoint]:
    return [
        ModelCheckpoint(folder, "newest-{epoch}-{step}", save_last=True),
        ModelCheckpoint(folder, "best-{epoch}-{step}", "value"),
    ]


def best_and_last(folder: Path) -> list[ModelCheckpoint]:
    return [ModelCheckpoint(folder, "{epoch}-{step}", "value", save_top_k=2, save_last=True)]


def by_steps(folder: Path) -> list[ModelCheckpoint]:
    return [
        ModelCheckpoint(folder, "a-{step}", "value", every_n_train_steps=2, save_top_k=2, save_last=True),
        ModelCheckpoint(folder, "b-{step}", "loss", every_n_train_steps=2, save_top_k=1, save_last=True),
        ModelCheckpoint(folder, "c-{step}", every_n_train_steps=3),
    ]


def fit(keepers: Keepers, folder: Path, ckpt_path: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train, and return what the callbacks have written and noted."""
    callbacks = keepers(folder)
    train(Moving(), *callbacks, ckpt_path=ckpt_path, max_epochs=3, **options)
    return {
        "best": [{Path(path).name: score.item() for path, score in each.best_k_models.items()} for each in callbacks],
        "score": [each.best_model_score for each in callbacks],
        "last": [Path(each.last_model_path).name for each in callbacks],
        "steps": {path.name: read(path)["global_step"] for path in folder.iterdir()},
    }


@pytest.mark.parametrize(
    ("keepers", "interval", "accumulate", "source"),
    pairwise([last_first, best_and_last, by_steps], [1.0, 0.5], [1, 3], ["written", "last"]),
)
@pytest.mark.quick_cases(2)
@pytest.mark.thorough
def test_a_run_that_is_killed_behind_any_write_has_the_same_best_files(
    tmp_path: Path,
    keepers: Keepers,
    interval: float,
    accumulate: int,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"val_check_interval": interval, "accumulate_grad_batches": accumulate}
    folder = tmp_path / "files"
    monkeypatch.setattr(Copying, "copies", [])
    expected = fit(keepers, folder, cls=Copying, **options)
    assert Copying.copies
    for written, copy in Copying.copies:
        shutil.rmtree(folder)
        copy.rename(folder)
        if source == "last":
            written = folder / "last.ckpt"
        if not written.exists():
            continue
        result = fit(keepers, folder, written, **options)
        if source == "written":
            # What the callback does with its files behind the write is lost with the process.
            for name in ("last", "steps"):
                result[name] = expected[name]
        assert result == expected, f"from {written.name} in {copy.name}"


def save_all(folder: Path, epochs: int, ckpt_path: Path | None = None, **options: Any) -> None:
    keeper = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    train(Moving(), keeper, ckpt_path=ckpt_path, max_epochs=epochs, **options)


def make_older(path: Path) -> None:
    """Times of files may be the same where they are written at once."""
    os.utime(path, (0, 0))


def test_newer_files_of_another_run_stay(tmp_path: Path) -> None:
    save_all(tmp_path, 1)
    make_older(tmp_path / "epoch=0.ckpt")
    save_all(tmp_path, 3)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    # The run is resumed twice: the second time its own files are newer, too.
    for names in (["epoch=1-v1.ckpt", "epoch=2-v1.ckpt"], ["epoch=1-v1.ckpt", "epoch=2-v1.ckpt"]):
        save_all(tmp_path, 3, tmp_path / "epoch=0.ckpt")
        assert sorted({*tmp_path.iterdir()} - {*before}) == [tmp_path / name for name in names]
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize("content", [b"no checkpoint", None], ids=["damaged", "of Lightning"])
def test_newer_files_of_unknown_origin_stay(tmp_path: Path, content: bytes | None) -> None:
    save_all(tmp_path, 1)
    make_older(tmp_path / "epoch=0.ckpt")
    unknown = tmp_path / "epoch=1.ckpt"
    if content is None:
        torch.save({"state_dict": {}}, unknown)
    else:
        unknown.write_bytes(content)
    before = unknown.read_bytes()
    save_all(tmp_path, 2, tmp_path / "epoch=0.ckpt")
    assert unknown.read_bytes() == before
    assert (tmp_path / "epoch=1-v1.ckpt").exists()


def test_newer_files_of_the_same_run_are_replaced_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_all(tmp_path, 3)
    make_older(tmp_path / "epoch=0.ckpt")
    caplog.clear()
    with caplog.at_level("INFO"):
        save_all(tmp_path, 3, tmp_path / "epoch=0.ckpt")
    said = [record.getMessage() for record in caplog.records if "replaces" in record.getMessage()]
    paths = [str(tmp_path / f"epoch={epoch}.ckpt") for epoch in (1, 2)]
    assert said == [f"ModelCheckpoint replaces {path!r}, which this run wrote before it was resumed." for path in paths]
    assert len([*tmp_path.iterdir()]) == 3


def with_weights(folder: Path) -> list[ModelCheckpoint]:
    weights = ModelCheckpoint(folder, "weights-{epoch}", "value", save_top_k=-1, save_weights_only=True)
    return [ModelCheckpoint(folder, "first-{epoch}", save_top_k=-1), weights]


def with_versions(folder: Path) -> list[ModelCheckpoint]:
    return [ModelCheckpoint(folder, "first", "value", save_top_k=-1)]


@pytest.mark.parametrize(("keepers", "first"), [(with_weights, "first-epoch=0.ckpt"), (with_versions, "first.ckpt")])
def test_each_file_is_replaced_once(keepers: Keepers, first: str, tmp_path: Path) -> None:
    """Those of weights alone, too, and those that have a number behind one name."""
    expected = fit(keepers, tmp_path)
    make_older(tmp_path / first)
    assert fit(keepers, tmp_path, tmp_path / first) == expected
    assert len(expected["steps"]) == 3 * len(keepers(tmp_path))


def test_a_link_to_the_last_file_follows_a_run_that_was_killed(tmp_path: Path) -> None:
    """The link is no older than the file that it names, from which the run resumes."""

    def keepers(folder: Path) -> list[ModelCheckpoint]:
        return [ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_last="link")]

    expected = fit(keepers, tmp_path)
    # Killed behind the first link.
    (tmp_path / "last.ckpt").unlink()
    (tmp_path / "last.ckpt").symlink_to("epoch=0.ckpt")
    for epoch in (1, 2):
        (tmp_path / f"epoch={epoch}.ckpt").unlink()
    assert fit(keepers, tmp_path, tmp_path / "last.ckpt") == expected
    assert os.readlink(tmp_path / "last.ckpt") == "epoch=2.ckpt"


@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint_writes_nothing_in_a_fast_dev_run(tmp_path: Path, save_last: Any) -> None:
    keepers = [ModelCheckpoint(tmp_path, monitor=name, save_last=save_last) for name in (None, "value")]
    assert train(Moving(), *keepers, fast_dev_run=2).global_step == 2
    assert not list(tmp_path.iterdir())
