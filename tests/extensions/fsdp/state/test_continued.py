"""Checkpoints of one strategy are continued by another one, and after a kill: to the weights of one undisturbed run."""

import os
import random
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from equipoise import PipelineStrategy, WorkerError
from tests.extensions.fsdp.mesh_modules import Cut, CutAndSharded
from tests.extensions.fsdp.programs import Net, SavesAfter, Way, assert_close, weights_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:The checkpoint holds states of callbacks", "ignore:The run began with", "ignore:Ranks from 1 on begin with"
)

IN_FOLDERS = {"checkpoints": "sharded"}
WAYS = {
    "one device": Way(Net, "single_device", 1, 1),
    "ddp": Way(Net, "ddp", 2, 2),
    "pipeline": Way(Net, PipelineStrategy(micro_batches=2), 2, 1),
    "2 of fsdp": Way(Net, {}, 2, 2),
    "3 of fsdp": Way(Net, {}, 3, 3),
    "2 x 2 of fsdp": Way(Net, {"replicas": 2}, 4, 4),
    "2 of fsdp, in folders": Way(Net, IN_FOLDERS, 2, 2),
    "2 x 2 of fsdp, in folders": Way(Net, {"replicas": 2, **IN_FOLDERS}, 4, 4),
    "tensor 2": Way(Cut, {"tensor": 2}, 2, 1),
    "tensor 2, in folders": Way(CutAndSharded, {"tensor": 2, **IN_FOLDERS}, 2, 1),
    "data 2 x tensor 2": Way(Cut, {"tensor": 2}, 4, 2),
    "data 2 x tensor 2, in folders": Way(CutAndSharded, {"tensor": 2, **IN_FOLDERS}, 4, 2),
}
SEED = 20
STEPS = 6
QUICK = [("2 of fsdp", "one device"), ("2 of fsdp, in folders", "one device")]
SLOW = [
    *(("2 of fsdp", name) for name in ("2 of fsdp", "ddp", "pipeline", "3 of fsdp", "tensor 2")),
    *((name, "2 of fsdp") for name in ("ddp", "pipeline", "one device")),
    *(("2 of fsdp, in folders", name) for name in ("ddp", "pipeline", "3 of fsdp", "2 x 2 of fsdp")),
    ("2 x 2 of fsdp, in folders", "one device"),
    ("tensor 2", "data 2 x tensor 2, in folders"),
    ("one device", "tensor 2, in folders"),
    ("tensor 2, in folders", "2 of fsdp"),
    ("data 2 x tensor 2", "tensor 2"),
    ("data 2 x tensor 2, in folders", "data 2 x tensor 2"),
]


@cache
def undisturbed(**options: Any) -> dict[str, Any]:
    return weights_of(WAYS["one device"].fit(**options))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("writer", "reader", "epoch", "batch"),
    [
        *((*pair, 1, 2) for pair in QUICK),
        *(pytest.param(*pair, 1, 2, marks=pytest.mark.slow) for pair in SLOW),
        # Before the first step, where optimisers have no state.
        pytest.param("2 of fsdp", "ddp", 0, 0, marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_under_another_strategy(
    writer: str, reader: str, epoch: int, batch: int, tmp_path: Path
) -> None:
    """Weights, states of optimisers and schedulers, the gradients of an open window and the position come along."""
    path = tmp_path / "open.ckpt"
    WAYS[writer].fit(accumulate_grad_batches=2, callbacks=[SavesAfter(path, batch, epoch)])
    module = WAYS[reader].fit(WAYS[writer], accumulate_grad_batches=2, ckpt_path=path)
    assert_close(undisturbed(accumulate_grad_batches=2), weights_of(module))


class Killed(Callback):
    """Kills the last process before a batch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_a_killed_run_continues_under_another_strategy(number: int, tmp_path: Path) -> None:
    draws = random.Random(SEED + number)
    killed, step = (
        draws.choice([name for name in WAYS if "fsdp" in name or "tensor" in name]),
        draws.randrange(1, STEPS),
    )
    resumed = draws.choice([name for name in WAYS if name != killed])
    print(f"{killed} is killed before step {step} and continued by {resumed}")
    options: dict[str, Any] = {"count": 12 * STEPS, "max_epochs": 1}
    saves = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_last=True)
    with pytest.raises(WorkerError, match="SIGKILL"):
        WAYS[killed].fit(callbacks=[saves, Killed(step)], enable_checkpointing=True, **options)
    module = WAYS[resumed].fit(WAYS[killed], ckpt_path=tmp_path / "last.ckpt", **options)
    assert_close(undisturbed(**options), weights_of(module), 1e-10)
