"""A checkpoint that the main process cannot write is an error in all processes, at once."""

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from equipoise import CheckpointError, DDPStrategy
from tests.support.trainer_runs import Small, loader, trainer


class Saves(L.Callback):
    """Saves where a file lies in place of the folder, goes on, and writes the errors of all processes."""

    def __init__(self, path: Path, report: Path) -> None:
        self.path = path
        self.report = report

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        begin = time.monotonic()
        with pytest.raises((CheckpointError, OSError)) as caught:
            trainer.save_checkpoint(self.path)
        assert time.monotonic() - begin < 60.0
        seen = trainer.strategy.processes.gather_objects(f"{caught.type.__name__}: {caught.value}")
        if trainer.is_global_zero:
            self.report.write_text("\n".join(seen))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_all_processes_learn_of_it_and_can_go_on(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    saves = Saves(tmp_path / "file" / name, tmp_path / "seen")
    run = trainer(strategy=DDPStrategy(timeout=120.0), devices=2, callbacks=[saves])
    run.fit(Small(), loader(4))
    assert run.state.finished
    first, second = (tmp_path / "seen").read_text().splitlines()
    assert first.startswith(("FileExistsError: ", "NotADirectoryError: "))
    assert second == f"CheckpointError: The main process could not write a checkpoint. {first}"
