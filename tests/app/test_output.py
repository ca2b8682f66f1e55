"""Which checkpoint `last` and `best` stand for."""

import os
from pathlib import Path

import pytest
import torch

from equipoise.app.output import find_checkpoint, keep_metrics
from tests.parallel.shards.folders import save as save_shards

VALUES = {"output_dir": "outputs/today/3", "module": {"_target_": "mine.Net", "lr": 0.1}}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(path: str, age: int, target: str = "mine.Net", best: str = "") -> Path:
    """A checkpoint `age` seconds old, in the folder of a run that trained `target`."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"callbacks": {"ModelCheckpoint{'monitor': 'x'}": {"best_model_path": best}}, "state_dict": {}}, file)
    (file.parents[1] / "config.yaml").write_text(f"module: {{_target_: {target}, lr: 0.2}}\n")
    os.utime(file, (1e9 - age, 1e9 - age))
    return file


def test_nothing():
    assert find_checkpoint("last", VALUES) is None
    assert find_checkpoint("best", VALUES) is None


def test_last_is_the_newest_of_the_same_module():
    save("outputs/today/0/checkpoints/a.ckpt", age=5)
    newest = save("outputs/today/1/checkpoints/b.ckpt", age=3)
    save("outputs/today/2/checkpoints/c.ckpt", age=1, target="other.Net")
    assert find_checkpoint("last", VALUES) == newest


def test_jobs_of_a_sweep_count():
    save("outputs/today/0/checkpoints/a.ckpt", age=5)
    newest = save("multirun/today/1/7/checkpoints/b.ckpt", age=3)
    assert find_checkpoint("last", VALUES) == newest


def test_the_runs_own_folder_comes_first():
    own = save("outputs/today/3/checkpoints/a.ckpt", age=5)
    save("outputs/today/1/checkpoints/b.ckpt", age=3)
    assert find_checkpoint("last", VALUES) == own


def test_a_checkpoint_without_a_configuration_is_nobodys():
    stray = save("outputs/today/0/checkpoints/a.ckpt", age=5)
    (stray.parents[1] / "config.yaml").unlink()
    assert find_checkpoint("last", VALUES) is None


@pytest.mark.parametrize("text", ["", "module: null", "[1]", "module: {"])
def test_an_odd_configuration_is_passed_over(text):
    odd = save("outputs/today/0/checkpoints/a.ckpt", age=5)
    (odd.parents[1] / "config.yaml").write_text(text)
    assert find_checkpoint("last", VALUES) is None


def test_best_is_that_of_the_newest_run_wherever_its_folder_is_now():
    best = save("outputs/today/1/checkpoints/best.ckpt", age=4)
    save("outputs/today/1/checkpoints/last.ckpt", age=3, best="/elsewhere/checkpoints/best.ckpt")
    assert find_checkpoint("best", VALUES) == best
    best.unlink()
    assert find_checkpoint("best", VALUES) == best.with_name("last.ckpt")


def test_sharded_checkpoints_count():
    """They are folders, and the files in them are no checkpoints."""
    best = Path("outputs/today/1/checkpoints/best.ckpt")
    last = best.with_name("last.ckpt")
    for path, age in ((best, 5), (last, 3)):
        rest = {"callbacks": {"ModelCheckpoint": {"best_model_path": str(best)}}, "state_dict": {}}
        save_shards(path, {"w": torch.ones(2)}, rest)
        os.utime(path, (1e9 - age, 1e9 - age))
    (best.parents[1] / "config.yaml").write_text("module: {_target_: mine.Net, lr: 0.2}\n")
    assert find_checkpoint("last", VALUES) == last
    assert find_checkpoint("best", VALUES) == best


def test_metrics_of_an_earlier_run_are_put_aside(here):
    keep_metrics(here)
    for text in ("first", "second"):
        (here / "metrics.csv").write_text(text)
        keep_metrics(here)
    assert [(here / f"metrics_{i}.csv").read_text() for i in (0, 1)] == ["first", "second"]
    assert not (here / "metrics.csv").exists()
