"""Runs that are killed at a random step and resumed on another mesh: equal to the run that nothing has disturbed."""

import os
import random
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from equipoise.errors import WorkerError
from tests.extensions.fsdp.mesh_modules import Cut, CutAndSharded
from tests.extensions.fsdp.programs import Net, assert_close, fit, fsdp, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks")]

STEPS = 6
# The module, the options of the strategy, the processes, and the batches of a step.
MESHES: dict[str, tuple[Any, Any, int, int]] = {
    "one device": (Net, None, 1, 1),
    "2 of fsdp": (Net, {}, 2, 2),
    "tensor 2": (Cut, {"tensor": 2}, 2, 1),
    "tensor 2, in folders": (CutAndSharded, {"tensor": 2, "checkpoints": "sharded"}, 2, 1),
    "data 2 x tensor 2": (Cut, {"tensor": 2}, 4, 2),
    "data 2 x tensor 2, in folders": (Cut, {"tensor": 2, "checkpoints": "sharded"}, 4, 2),
}
SEED = 20


class Killed(Callback):
    """Kills the last process before a batch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def run(name: str, batches: int, **options: Any) -> Any:
    kind, strategy, processes, _ = MESHES[name]
    chosen = "single_device" if strategy is None else fsdp(**strategy)
    return fit(kind, chosen, processes, count=12 * STEPS, batch_size=12 // batches, max_epochs=1, **options)[0]


@cache
def undisturbed() -> dict[str, Any]:
    return weights_of(run("one device", 1))


def draw(number: int) -> tuple[str, str, int]:
    """Return the mesh that is killed, the one that goes on, and the step before which that happens."""
    draws = random.Random(SEED + number)
    killed = draws.choice([name for name, (*_, processes, _) in MESHES.items() if processes > 1])
    return killed, draws.choice([name for name in MESHES if name != killed]), draws.randrange(1, STEPS)


def check(number: int, folder: Path) -> None:
    """Kill, resume, and compare."""
    killed, resumed, step = draw(number)
    batches = MESHES[killed][-1]
    saves = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_last=True)
    with pytest.raises(WorkerError, match="SIGKILL"):
        run(killed, batches, callbacks=[saves, Killed(step)], enable_checkpointing=True)
    module = run(resumed, batches, ckpt_path=folder / "last.ckpt")
    assert_close(undisturbed(), weights_of(module), 1e-10)


@pytest.mark.parametrize("number", range(3))
def test_a_killed_run_goes_on_with_another_mesh(number: int, tmp_path: Path) -> None:
    check(number, tmp_path)
