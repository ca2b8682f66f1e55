"""Which checkpoint `last` and `best` stand for."""

import os
from pathlib import Path

import pytest
import torch

from equipoise.app.build import chosen_checkpoint
from equipoise.app.earlier_runs.checkpoints import changed_values, find_checkpoint
from equipoise.errors import ConfigurationError
from tests.parallel.shards.folders import save as save_shards

VALUES = {"output_dir": "outputs/today/3", "stage": "fit", "module": {"_target_": "mine.Net", "lr": 0.1}}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(path: str, age: int, target: str = "mine.Net", best: str = "", development: bool = False) -> Path:
    """A checkpoint `age` seconds old, in the folder of a run that trained `target`."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"callbacks": {"ModelCheckpoint{'monitor': 'x'}": {"best_model_path": best}}, "state_dict": {}}, file)
    trainer = f"trainer: {{fast_dev_run: {int(development)}}}"
    (file.parents[1] / "config.yaml").write_text(f"module: {{_target_: {target}, lr: 0.2}}\n{trainer}\n")
    os.utime(file, (1e9 - age, 1e9 - age))
    return file


def test_last_is_the_newest_of_the_same_module():
    save("outputs/today/0/checkpoints/a.ckpt", age=5)
    newest = save("outputs/today/1/checkpoints/b.ckpt", age=3)
    save("outputs/today/2/checkpoints/c.ckpt", age=1, target="other.Net")
    assert find_checkpoint("last", VALUES).path == newest


def test_a_run_in_development_does_not_count():
    run = save("outputs/today/0/checkpoints/a.ckpt", age=5)
    save("outputs/today/1/checkpoints/last.ckpt", age=3, development=True)
    assert find_checkpoint("last", VALUES) == (run, None)


def test_a_job_of_a_sweep_is_passed_over_and_named():
    older = save("multirun/today/0/7/checkpoints/b.ckpt", age=7)
    assert find_checkpoint("last", VALUES) == (None, older)
    with pytest.raises(ConfigurationError, match=f"The newest of a job of a sweep is '{older}'"):
        chosen_checkpoint({**VALUES, "ckpt_path": "last"})
    run = save("outputs/today/0/checkpoints/a.ckpt", age=5)
    assert find_checkpoint("last", VALUES) == (run, None)
    newer = save("multirun/today/1/7/checkpoints/b.ckpt", age=3)
    assert find_checkpoint("last", VALUES) == (run, newer)
    # A sweep somewhere else is known by its results.
    elsewhere = save("outputs/sweep/7/checkpoints/b.ckpt", age=2)
    Path("outputs/sweep/results.csv").touch()
    assert find_checkpoint("last", VALUES) == (run, elsewhere)


@pytest.mark.parametrize("choice", ["last", "best"])
def test_a_newer_job_of_a_sweep_is_passed_over_aloud(choice, capsys):
    best = save("outputs/today/0/checkpoints/best.ckpt", age=6)
    save("outputs/today/0/checkpoints/last.ckpt", age=5, best=str(best))
    job = save("multirun/today/1/7/checkpoints/last.ckpt", age=3)
    path = chosen_checkpoint({**VALUES, "ckpt_path": choice})
    assert Path(path).name == f"{choice}.ckpt"
    words = f"ckpt_path={choice} passes over jobs of sweeps, though '{job}' is newer; ckpt_path=FILE takes one"
    assert capsys.readouterr().err == f"equipoise: {words}\n"


def test_the_runs_own_folder_comes_first():
    own = save("outputs/today/3/checkpoints/a.ckpt", age=5)
    save("outputs/today/1/checkpoints/b.ckpt", age=3)
    assert find_checkpoint("last", VALUES).path == own


def test_a_checkpoint_without_a_configuration_is_nobodys():
    stray = save("outputs/today/0/checkpoints/a.ckpt", age=5)
    (stray.parents[1] / "config.yaml").unlink()
    assert find_checkpoint("last", VALUES).path is None


@pytest.mark.parametrize("text", ["", "module: null", "[1]", "module: {"])
def test_an_odd_configuration_is_passed_over(text):
    odd = save("outputs/today/0/checkpoints/a.ckpt", age=5)
    (odd.parents[1] / "config.yaml").write_text(text)
    assert find_checkpoint("last", VALUES).path is None


def test_best_is_that_of_the_newest_run_wherever_its_folder_is_now():
    best = save("outputs/today/1/checkpoints/best.ckpt", age=4)
    save("outputs/today/1/checkpoints/last.ckpt", age=3, best="/elsewhere/checkpoints/best.ckpt")
    assert find_checkpoint("best", VALUES).path == best.absolute()


def test_a_run_without_its_best_is_refused():
    save("outputs/today/1/checkpoints/last.ckpt", age=3)
    with pytest.raises(ConfigurationError, match=r"no best checkpoint: no ModelCheckpoint has noted one.*last takes"):
        find_checkpoint("best", VALUES)
    save("outputs/today/1/checkpoints/last.ckpt", age=3, best="/elsewhere/checkpoints/best.ckpt")
    with pytest.raises(ConfigurationError, match=r"/elsewhere/checkpoints/best.ckpt is gone"):
        find_checkpoint("best", VALUES)


def test_changed_values():
    path = str(save("outputs/today/1/checkpoints/last.ckpt", age=3))
    fit = {**VALUES, "trainer": {"fast_dev_run": 0, "max_steps": None, "max_epochs": 3}, "test": True}
    expected = {"module.lr": ("0.2", "0.1"), "trainer.max_epochs": ("-", "3")}
    assert changed_values(path, fit) == expected
    del expected["trainer.max_epochs"]
    assert changed_values(path, {**fit, "stage": "test"}) == expected
    Path("outputs/today/1/config.yaml").unlink()
    assert changed_values(path, fit) == {}


def test_sharded_checkpoints_count():
    """They are folders, and the files in them are no checkpoints."""
    best = Path("outputs/today/1/checkpoints/best.ckpt")
    last = best.with_name("last.ckpt")
    for path, age in ((best, 5), (last, 3)):
        rest = {"callbacks": {"ModelCheckpoint": {"best_model_path": str(best)}}, "state_dict": {}}
        save_shards(path, {"w": torch.ones(2)}, rest)
        os.utime(path, (1e9 - age, 1e9 - age))
    (best.parents[1] / "config.yaml").write_text("module: {_target_: mine.Net, lr: 0.2}\n")
    assert find_checkpoint("last", VALUES).path == last
    assert find_checkpoint("best", VALUES).path == best.absolute()
