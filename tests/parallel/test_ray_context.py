"""Facts that Ray's modules know of a process, where Ray has loaded them; tests/extensions/ray has the real ones."""

import sys
from types import SimpleNamespace

import pytest

from equipoise import SingleDeviceStrategy
from equipoise.extensions.ray.ray import RayReport, last_checkpoint
from equipoise.parallel.ray_context import is_in_ray, ray_world_size
from tests.support.trainer_runs import refuses, trainer

TRAIN = "ray.train"
TUNE = "ray.tune.trainable.trainable_fn_utils"


def outside():
    raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function.")


@pytest.fixture
def worker(monkeypatch):
    """A process in which Ray Train has loaded its modules: one of two workers."""
    module = SimpleNamespace(
        get_context=lambda: SimpleNamespace(get_world_size=lambda: 2), get_checkpoint=lambda: None, reports=[]
    )
    monkeypatch.setitem(sys.modules, TRAIN, module)
    return module


def checkpoint_in(folder):
    return lambda: SimpleNamespace(path=str(folder), to_directory=lambda: str(folder))


def test_a_process_without_ray():
    assert TRAIN not in sys.modules
    assert not is_in_ray()
    assert ray_world_size() == 1
    assert last_checkpoint() is None


def test_a_program_that_has_imported_ray_is_no_worker(monkeypatch):
    monkeypatch.setitem(sys.modules, TRAIN, SimpleNamespace(get_context=outside))
    monkeypatch.setitem(sys.modules, TUNE, SimpleNamespace(_in_tune_session=lambda: None))
    assert not is_in_ray()
    assert ray_world_size() == 1
    assert last_checkpoint() is None


def test_workers_without_a_process_group_are_refused(worker):
    """Each of them would train a copy of its own."""
    for options in ({}, {"strategy": "ddp", "devices": 2}):
        refuses(lambda options=options: trainer(**options), "one of 2 workers", "TorchTrainer")
    trainer(devices=1, strategy=SingleDeviceStrategy(independent=True))


def test_the_file_in_a_reported_checkpoint(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "get_checkpoint", checkpoint_in(tmp_path))
    assert last_checkpoint() is None
    # Tune's callback has another name for it.
    (tmp_path / "checkpoint").touch()
    (tmp_path / ".metadata.json").touch()
    assert last_checkpoint() == str(tmp_path / "checkpoint")
    (tmp_path / "checkpoint.ckpt").touch()
    assert last_checkpoint() == str(tmp_path / "checkpoint.ckpt")


def test_a_checkpoint_on_another_machine_is_downloaded(worker, tmp_path, monkeypatch):
    (tmp_path / "checkpoint.ckpt").touch()
    elsewhere = SimpleNamespace(path="bucket/checkpoint", to_directory=lambda: str(tmp_path))
    monkeypatch.setattr(worker, "get_checkpoint", lambda: elsewhere)
    assert last_checkpoint() == str(tmp_path / "checkpoint.ckpt")


@pytest.mark.parametrize("every", [0, 1.5])
def test_a_wrong_interval_of_reports(every):
    refuses(lambda: RayReport(every), "every_n_train_steps must be an integer of at least 1")
