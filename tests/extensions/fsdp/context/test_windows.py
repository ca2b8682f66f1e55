"""Accumulation windows on divided sequences: saved while they are open, and parts of which some have no weight."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.fsdp.context.networks import Gpt, Task, Weighted, fit
from tests.extensions.fsdp.programs import SavesAfter, assert_close, assert_same_in_processes, fsdp

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks")]

PLAN = {"network.perceptron.1": "colwise", "network.perceptron.3": "rowwise"}
# The options of the strategy, and the number of processes.
MESHES: dict[str, tuple[dict[str, Any] | None, int]] = {
    "one device": (None, 1),
    "context 2": ({"context": 2}, 2),
    "context 2, in folders": ({"context": 2, "checkpoints": "sharded"}, 2),
    "context 2 x tensor 2": ({"context": 2, "tensor": 2, "tensor_plan": PLAN}, 4),
    "both, in folders": ({"context": 2, "tensor": 2, "tensor_plan": PLAN, "checkpoints": "sharded"}, 4),
}


def run(kind: Any, mesh: str, **options: Any) -> dict[str, Any]:
    strategy, processes = MESHES[mesh]
    chosen = "single_device" if strategy is None else fsdp(**strategy)
    options = {"accumulate_grad_batches": 2, "max_epochs": 1, **options}
    return fit(lambda: kind(Gpt()), chosen, processes, **options)


@pytest.mark.parametrize(
    ("kind", "writer", "reader"),
    [
        (Weighted, "context 2", "one device"),
        (Task, "context 2 x tensor 2", "context 2"),
        (Weighted, "one device", "context 2 x tensor 2"),
        (Task, "context 2, in folders", "both, in folders"),
        (Weighted, "both, in folders", "one device"),
    ],
)
def test_a_run_continues_within_a_window_on_another_mesh(kind: Any, writer: str, reader: str, tmp_path: Path) -> None:
    """Three batches were seen, of which the last has begun a window."""
    path = tmp_path / "open.ckpt"
    run(kind, writer, callbacks=[SavesAfter(path, 2)])
    assert_close(run(kind, "one device"), run(kind, reader, ckpt_path=path), tolerance=1e-10)


class Middle(Weighted):
    """Has labels in the middle alone, which the first of two processes does not have."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        labels = batch["shift_labels"].clone()
        labels[:, :5] = labels[:, 11:] = -100
        return {**batch, "shift_labels": labels}


def test_a_process_without_weight_counts_for_nothing() -> None:
    runs = [{"weighted": partial(run, Middle, mesh)} for mesh in ("one device", "context 2")]
    assert_same_in_processes(2, *runs, tolerance=1e-10)
