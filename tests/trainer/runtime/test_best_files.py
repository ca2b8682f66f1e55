"""A run that is resumed in another folder keeps its best values and files, as if it had never ended."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.trainer_runs import Validated, loader, trainer

EPOCHS = 8


class Valued(Validated):
    """The value of each epoch is given."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = values

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.values[self.current_epoch])


def fit(folder: Path | str, values: list[float], epochs: int, ckpt_path: Any = None, **options: Any) -> Any:
    """Train, and return the callback that keeps the best."""
    keeper = ModelCheckpoint(folder, "{epoch}", **{"monitor": "value", "save_last": True, **options})
    run = trainer(max_epochs=epochs, callbacks=[keeper], enable_checkpointing=True)
    run.fit(Valued(values), loader(2), loader(1), ckpt_path=ckpt_path)
    return keeper


def best_of(keeper: Any) -> Any:
    """The names and values that a callback keeps, and the last name: the same wherever the files are."""
    kept = {Path(path).name: float(value) for path, value in keeper.best_k_models.items()}
    worst = Path(keeper.kth_best_model_path).name
    return kept, Path(keeper.best_model_path).name, float(keeper.best_model_score), worst, float(keeper.kth_value)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("mode", "save_top_k"), [("min", 1), ("max", 3), ("min", 3), ("max", -1)])
def test_the_best_file_is_that_of_an_undisturbed_run(tmp_path: Path, mode: str, save_top_k: int) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    drawn = random.Random(seed)
    values = [drawn.random() for _ in range(EPOCHS)]
    options = {"mode": mode, "save_top_k": save_top_k}
    expected = best_of(fit(tmp_path / "whole", values, EPOCHS, **options))
    # Killed twice, each time resumed in a new folder.
    first, second = sorted(drawn.sample(range(1, EPOCHS), 2))
    fit(tmp_path / "a", values, first, **options)
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    fit(tmp_path / "b", values, second, tmp_path / "a" / "last.ckpt", **options)
    keeper = fit(tmp_path / "c", values, EPOCHS, tmp_path / "b" / "last.ckpt", **options)
    if save_top_k == -1:
        # Lightning compares with the worst of all only where their number is limited.
        assert best_of(keeper)[:3] == expected[:3]
    else:
        assert best_of(keeper) == expected
    # The files of a former folder are those of a former run.
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    epoch = int(Path(keeper.best_model_path).stem.partition("=")[2])
    assert torch.load(keeper.best_model_path, weights_only=True)["epoch"] == epoch


def test_a_resumed_run_may_keep_fewer_files(tmp_path: Path) -> None:
    values = [3.0, 1.0, 2.0, 5.0]
    fit(tmp_path / "a", values, 3, save_top_k=3)
    keeper = fit(tmp_path / "b", values, 4, tmp_path / "a" / "last.ckpt", save_top_k=1)
    assert best_of(keeper) == ({"epoch=1.ckpt": 1.0}, "epoch=1.ckpt", 1.0, "epoch=1.ckpt", 1.0)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["last.ckpt"]


def test_best_files_are_found_in_a_folder_that_was_moved_or_copied(tmp_path: Path) -> None:
    values = [1.0, 2.0, 3.0]
    fit(tmp_path / "a" / "run", values, 2)
    shutil.copytree(tmp_path / "a" / "run", tmp_path / "copy")
    keeper = fit(tmp_path / "other", values, 3, tmp_path / "copy" / "last.ckpt")
    assert keeper.best_model_path == str(tmp_path / "copy" / "epoch=0.ckpt")
    # The best of the second run lies in the folder of the first; both move.
    fit(tmp_path / "b" / "run", values, 2, tmp_path / "a" / "run" / "last.ckpt")
    for name in ("a", "b"):
        shutil.move(tmp_path / name, tmp_path / "moved" / name)
    last = tmp_path / "moved" / "b" / "run" / "last.ckpt"
    keeper = fit(tmp_path / "c", values, 3, last)
    assert keeper.best_model_path == str(tmp_path / "moved" / "a" / "run" / "epoch=0.ckpt")


def test_a_best_file_that_is_gone_is_named(tmp_path: Path) -> None:
    values = [1.0, 2.0, 3.0]
    fit(tmp_path / "a", values, 2)
    best = tmp_path / "a" / "epoch=0.ckpt"
    best.unlink()
    # A file of that name, of another run.
    fit(tmp_path / "other", values, 1)
    shutil.copy(tmp_path / "other" / "epoch=0.ckpt", best)
    with pytest.warns(UserWarning, match=r"epoch=0.ckpt' with value=1, is gone"):
        keeper = fit(tmp_path / "b", values, 3, tmp_path / "a" / "last.ckpt")
    assert best_of(keeper)[:3] == ({"epoch=1.ckpt": 2.0}, "epoch=1.ckpt", 2.0)


@pytest.mark.parametrize("monitor", ["value", None])
def test_files_on_another_file_system_stay(memory_files: Any, monitor: str | None) -> None:
    """There Lightning's callback removes what it keeps no more, in whatever folder."""
    values = [2.0, 1.0]
    options = {"monitor": monitor, "save_last": None}
    first = fit("memory://run10", values, 1, **options).best_model_path
    keeper = fit("memory://run1", values, 2, first, **options)
    assert keeper.best_model_path == "memory://run1/epoch=1.ckpt"
    assert memory_files.exists(first)
