"""Checkpoints of one strategy are continued by another one, to the weights of one undisturbed run."""

import copy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from equipoise import PipelineStrategy
from tests.extensions.fsdp.mesh_modules import Cut, CutAndSharded
from tests.extensions.fsdp.programs import STEP, Net, SavesAfter, assert_close, fit, fsdp, weights_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:The checkpoint holds states of callbacks", "ignore:The run began with", "ignore:Ranks from 1 on begin with"
)

IN_FOLDERS = {"checkpoints": "sharded"}


class Way(NamedTuple):
    """A way to train one network.

    Attributes:
        kind: The module.
        strategy: Options of `FSDPStrategy`, or another strategy.
        processes: The number of devices.
        batches: The number of batches that a step shares out.
    """

    kind: Any
    strategy: Any
    processes: int
    batches: int

    def fit(self, batches: int, **options: Any) -> Any:
        """Train with batches of the size of the way that has written the checkpoint."""
        strategy = fsdp(**self.strategy) if isinstance(self.strategy, dict) else copy.deepcopy(self.strategy)
        options = {"accumulate_grad_batches": 2, "batch_size": STEP // batches, **options}
        return fit(self.kind, strategy, self.processes, **options)[0]


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
QUICK = [("2 of fsdp", "one device"), ("2 of fsdp, in folders", "one device")]
SLOW = [
    *(("2 of fsdp", name) for name in ("ddp", "pipeline", "3 of fsdp", "tensor 2")),
    *((name, "2 of fsdp") for name in ("ddp", "one device")),
    *(("2 of fsdp, in folders", name) for name in ("ddp", "2 x 2 of fsdp")),
    ("2 x 2 of fsdp, in folders", "one device"),
    ("tensor 2", "data 2 x tensor 2, in folders"),
    ("one device", "tensor 2, in folders"),
    ("tensor 2, in folders", "2 of fsdp"),
    ("data 2 x tensor 2, in folders", "data 2 x tensor 2"),
]


@cache
def undisturbed() -> dict[str, Any]:
    return weights_of(fit(Net, accumulate_grad_batches=2)[0])


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
    batches = WAYS[writer].batches
    WAYS[writer].fit(batches, callbacks=[SavesAfter(path, batch, epoch)])
    module = WAYS[reader].fit(batches, ckpt_path=path)
    assert_close(undisturbed(), weights_of(module))
