"""State that hooks have set comes back in a resumed run, what cannot is named, and data are no state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.trainer_runs import Small, Stream, trainer
from tests.trainer.loops.test_resumption import SaveEverywhere

ROWS = torch.arange(8.0).view(4, 2)


class Saves(SaveEverywhere):
    """Saves after the second batch of the run, as the last callback."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ("on_train_batch_end",))


class Recording(Small):
    seen: list[Any] = []


def resumed(make: Any, folder: Path, *callbacks: Any, batch: int = 3) -> Any:
    """Trains, and continues after a batch with new objects; returns the module of the second run."""
    trainer(max_epochs=2, callbacks=[*callbacks, Saves(folder)]).fit(make(), DataLoader(ROWS, batch_size=2))
    module = make()
    path = folder / f"on_train_batch_end-{batch:02d}.ckpt"
    trainer(max_epochs=2, callbacks=list(callbacks)).fit(module, DataLoader(ROWS, batch_size=2), ckpt_path=path)
    return module


def test_what_a_program_loads_itself_is_its_own(tmp_path: Path) -> None:
    class Module(Recording):
        level = 1

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.level += 1

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.level = 10

    assert resumed(Module, tmp_path).level == 11


def test_what_the_start_sets_is_of_the_present_process(tmp_path: Path) -> None:
    class Module(Recording):
        runs = 0

        def on_train_start(self) -> None:
            Module.runs += 1
            self.folder = f"run {Module.runs}"

    assert resumed(Module, tmp_path).folder == "run 2"


def test_objects_that_lack_are_named(tmp_path: Path) -> None:
    class Meter:
        total = 0

    class Module(Recording):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 0:
                self.meter = Meter()
            if hasattr(self, "meter"):
                self.meter.total += 1

    with pytest.warns(UserWarning, match=r"lacks what the checkpoint cannot hold: Module\.meter"):
        resumed(Module, tmp_path)


def test_a_hook_that_is_called_again_leaves_optimisers_and_buffers(tmp_path: Path) -> None:
    class Meter:
        pass

    class Module(Recording):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def on_train_epoch_start(self) -> None:
            self.meter = Meter()
            self.count += 1
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5

        def on_train_end(self) -> None:
            self.rate = self.trainer.optimizers[0].param_groups[0]["lr"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    module = resumed(Module, tmp_path)
    assert float(module.count) == 2
    assert module.rate == 1e-4 / 4


def test_large_data_are_no_state(tmp_path: Path) -> None:
    class Module(Recording):
        def on_train_epoch_start(self) -> None:
            self.trainer.train_dataloader.dataset.more = torch.zeros(1 << 20)

    data = Stream(4)
    run = trainer(max_epochs=1)
    run.fit(Module(), DataLoader(data, batch_size=2))
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert (tmp_path / "x.ckpt").stat().st_size < 1 << 20


def test_persistent_workers_that_learn_no_epoch_are_named() -> None:
    class ByEpoch(Stream):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    loader = DataLoader(ByEpoch(4), batch_size=2, num_workers=1, persistent_workers=True)
    with pytest.warns(UserWarning, match="does not reach the workers") as warned:
        trainer(max_epochs=3).fit(Small(), loader)
    assert len([each for each in warned if "does not reach" in str(each.message)]) == 1
    assert ByEpoch.epochs == [0, 1, 2]
