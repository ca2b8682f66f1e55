"""Checkpoints of a module in shards: whole, and read by any number of processes under any strategy."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from equipoise import PipelineStrategy
from tests.extensions.fsdp.programs import Net, assert_close, fit, fsdp, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks")


class SavesAfter(Callback):
    """Saves once, behind a batch of the first epoch."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path = path
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


STRATEGIES = {
    "one device": (lambda: "single_device", 1),
    "2 of ddp": (lambda: "ddp", 2),
    "2 of fsdp": (fsdp, 2),
    "3 of fsdp": (fsdp, 3),
    "pipeline": (lambda: PipelineStrategy(micro_batches=2), 2),
}


def run(name: str, **options: Any) -> Any:
    strategy, devices = STRATEGIES[name]
    # The devices of a pipeline compute one batch together.
    batch_size = 12 if name == "pipeline" else None
    return fit(Net, strategy(), devices, batch_size=batch_size, **options)[0]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("2 of fsdp", "one device"),
        pytest.param("2 of fsdp", "2 of ddp", marks=pytest.mark.slow),
        pytest.param("2 of fsdp", "pipeline", marks=pytest.mark.slow),
        pytest.param("pipeline", "2 of fsdp", marks=pytest.mark.slow),
        pytest.param("one device", "3 of fsdp", marks=pytest.mark.slow),
        pytest.param("2 of ddp", "2 of fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_under_another_strategy(writer: str, reader: str, tmp_path: Path) -> None:
    """Weights, optimiser states and schedulers come along, so the end is that of one undisturbed run."""
    saves = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    run(writer, max_epochs=1, callbacks=[saves], enable_checkpointing=True)
    (path,) = tmp_path.iterdir()
    module = run(reader, ckpt_path=path)
    assert_close(weights_of(run("one device")), weights_of(module))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("2 of fsdp", "2 of fsdp"),
        ("2 of fsdp", "2 of ddp"),
        ("2 of ddp", "2 of fsdp"),
    ],
)
@pytest.mark.parametrize("batch", [0, 2])
def test_a_run_goes_on_within_a_window(writer: str, reader: str, batch: int, tmp_path: Path) -> None:
    """Gradients of an open window are in shards, and are summed over the processes already."""
    options = {"accumulate_grad_batches": 2, "max_epochs": 1}
    path = tmp_path / "open.ckpt"
    run(writer, callbacks=[SavesAfter(path, batch)], **options)
    assert_close(weights_of(run("one device", **options)), weights_of(run(reader, ckpt_path=path, **options)))
