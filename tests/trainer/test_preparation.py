"""Steps before a run that need no run: what a subclass overrides, and `prepare_data` in one process of each machine."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from equipoise import Trainer
from equipoise.trainer.preparation import _prepare_data, begin_run
from equipoise.trainer.runtime.request import Request
from tests.support.trainer_runs import Small, Validated, loader, trainer, with_step


class Prepares(Small):
    """Notes that it was asked to prepare its data."""

    def __init__(self, *, per_node: bool) -> None:
        super().__init__()
        self.prepare_data_per_node = per_node
        self.prepared = 0

    def prepare_data(self) -> None:
        self.prepared += 1


def test_a_subclass_may_save_checkpoints_in_its_own_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Mine(Trainer):
        saved: Any = None

        def save_checkpoint(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
            self.saved = filepath

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    # The name holds the number of the fit in its folder: other tests fit in the present one.
    run = trainer(Mine, default_root_dir=tmp_path)
    with pytest.raises(SIGTERMException):
        run.fit(with_step(lambda module, batch: signal.raise_signal(signal.SIGTERM)), loader())
    assert run.saved.name == "slurm-7.ckpt"


def test_a_subclass_may_say_whether_a_fit_validates() -> None:
    class Mine(Trainer):
        @property
        def enable_validation(self) -> bool:
            return False

    module = Validated()
    run = trainer(Mine)
    run.fit(module, loader(), loader())
    assert run.current_epoch == 1
    assert "validation" not in module.ran


class RootProfiler(PassThroughProfiler):
    """Notes the folder that it receives."""

    folder: Any = None

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self.folder = log_dir


def test_a_subclass_may_choose_the_folders_of_a_run(tmp_path: Path) -> None:
    class Rooted(Trainer):
        @property
        def default_root_dir(self) -> str:
            return str(tmp_path)

    class Logging(Rooted):
        @property
        def log_dir(self) -> str:
            return str(tmp_path / "logs")

    rooted = trainer(Rooted)
    assert rooted.log_dir == str(tmp_path)
    rooted.fit(Small(), loader())
    # Files of a job of Slurm are written there, for one.
    assert rooted.run_state.default_root_dir == str(tmp_path)

    profiler = RootProfiler()
    trainer(Logging, profiler=profiler).fit(Small(), loader())
    assert profiler.folder == str(tmp_path / "logs")


@pytest.mark.parametrize(
    ("per_node", "local_rank", "node_rank", "times"),
    [(True, 0, 0, 1), (True, 0, 1, 1), (True, 1, 0, 0), (False, 0, 0, 1), (False, 0, 1, 0), (False, 1, 1, 0)],
)
def test_data_are_prepared_once_per_machine_or_once(
    per_node: bool, local_rank: int, node_rank: int, times: int
) -> None:
    module = Prepares(per_node=per_node)
    hooks, _ = begin_run(trainer(Trainer).parts, Request(TrainerFn.FITTING, module))
    waits: list[str] = []
    processes = SimpleNamespace(local_rank=local_rank, node_rank=node_rank, barrier=waits.append)
    _prepare_data(processes, hooks)  # type: ignore[arg-type]
    assert module.prepared == times
    assert waits == ["prepare_data"]
