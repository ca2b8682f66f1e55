"""Checkpoints of modules on a device mesh: any mesh reads those of any other, and of one device."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.extensions.fsdp.mesh_modules import Cut, CutAndSharded
from tests.extensions.fsdp.programs import Net, assert_close, fit, fsdp, weights_of
from tests.extensions.fsdp.test_checkpoints import SavesAfter

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks")]

# The module, the options of the strategy, the processes, and the batches of a step.
MESHES: dict[str, tuple[Any, Any, int, int]] = {
    "one device": (Net, None, 1, 1),
    "2 of fsdp": (Net, {}, 2, 2),
    "tensor 2": (Cut, {"tensor": 2}, 2, 1),
    "tensor 2, in folders": (Cut, {"tensor": 2, "checkpoints": "sharded"}, 2, 1),
    "data 2 x tensor 2": (Cut, {"tensor": 2}, 4, 2),
    "data 2 x tensor 2, in folders": (CutAndSharded, {"tensor": 2, "checkpoints": "sharded"}, 4, 2),
}


def run(name: str, writer: str | None = None, **options: Any) -> Any:
    """Fit with the batches of a mesh, or those of the one that has written the checkpoint."""
    kind, strategy, processes, _ = MESHES[name]
    chosen = "single_device" if strategy is None else fsdp(**strategy)
    rows = MESHES[writer or name][-1]
    return fit(kind, chosen, processes, batch_size=12 // rows, **options)[0]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("tensor 2", "one device"),
        ("one device", "tensor 2"),
        ("2 of fsdp", "tensor 2"),
        ("tensor 2, in folders", "2 of fsdp"),
        ("data 2 x tensor 2", "tensor 2, in folders"),
        ("data 2 x tensor 2, in folders", "data 2 x tensor 2"),
        ("tensor 2", "data 2 x tensor 2, in folders"),
    ],
)
def test_a_run_goes_on_with_another_mesh(writer: str, reader: str, tmp_path: Path) -> None:
    """Weights, optimiser states and schedulers come along, so the end is that of one undisturbed run."""
    saves = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    run(writer, max_epochs=1, callbacks=[saves], enable_checkpointing=True)
    (path,) = tmp_path.iterdir()
    assert_close(weights_of(run("one device")), weights_of(run(reader, ckpt_path=path)))


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("tensor 2", "2 of fsdp"),
        ("2 of fsdp", "tensor 2"),
        ("data 2 x tensor 2", "tensor 2"),
        ("tensor 2", "data 2 x tensor 2"),
    ],
)
def test_a_run_goes_on_within_a_window(writer: str, reader: str, tmp_path: Path) -> None:
    """Gradients of an open window, logged values and the positions of rows come along."""
    options = {"accumulate_grad_batches": 2, "max_epochs": 1}
    path = tmp_path / "open.ckpt"
    run(writer, callbacks=[SavesAfter(path, 2)], **options)
    assert_close(weights_of(run("one device", **options)), weights_of(run(reader, writer, ckpt_path=path, **options)))
