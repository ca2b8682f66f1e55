"""`ckpt_path="last"` where Ray has started the workers anew: the checkpoint that was reported to it."""

import sys
from types import SimpleNamespace

import pytest

from tests.support.trainer_runs import Small, loader, trainer


@pytest.fixture
def worker(monkeypatch):
    """The only worker of a run of Ray Train."""
    context = SimpleNamespace(get_world_size=lambda: 1)
    module = SimpleNamespace(get_context=lambda: context, get_checkpoint=lambda: None)
    monkeypatch.setitem(sys.modules, "ray.train", module)
    return module


def test_last_asks_ray_first(worker, tmp_path, monkeypatch):
    # 1. The first attempt has no checkpoint yet, which is no reason for a warning.
    first = trainer(enable_checkpointing=True, default_root_dir=tmp_path)
    first.fit(Small(), loader(), ckpt_path="last")
    first.save_checkpoint(tmp_path / "reported" / "checkpoint.ckpt")

    # 2. The second resumes from the report.
    monkeypatch.setattr(worker, "get_checkpoint", lambda: SimpleNamespace(path=str(tmp_path / "reported")))
    second = trainer(max_epochs=2, enable_checkpointing=True, default_root_dir=tmp_path)
    second.fit(Small(), loader(), ckpt_path="last")
    assert second.ckpt_path == str(tmp_path / "reported" / "checkpoint.ckpt")
    assert (second.current_epoch, second.global_step) == (2, 6)
