"""State that hooks have set comes back in a resumed run, what cannot is named, and data are no state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.support.equality import assert_equal
from tests.support.resumption import assert_resumes
from tests.support.trainer_runs import Small, Stream, loader, trainer
from tests.trainer.state.resumed import fit, resumed


def test_what_a_program_loads_itself_is_its_own(tmp_path: Path) -> None:
    class Module(Small):
        level = 1

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.level += 1

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.level = 10

    assert resumed(Module, tmp_path).level == 11


def test_what_the_start_sets_is_of_the_present_process(tmp_path: Path) -> None:
    class Module(Small):
        runs = 0

        def on_train_start(self) -> None:
            Module.runs += 1
            self.folder = f"run {Module.runs}"

    assert resumed(Module, tmp_path).folder == "run 2"


def test_views_of_weights_are_no_values(tmp_path: Path) -> None:
    class Module(Small):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__()

        def on_train_start(self) -> None:
            # The first is replaced by other values in each step, the others stay views.
            self.level = self.layer.weight.data
            self.views = [self.layer.weight.data]

        def on_train_epoch_start(self) -> None:
            self.later = [self.layer.weight.data]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.level = self.layer.weight.data.clone() * 3

    undisturbed, module = fit(Module()), resumed(Module, tmp_path)
    weight = module.layer.weight
    assert_equal((undisturbed, undisturbed.level), (module, module.level))
    assert module.views[0].data_ptr() == module.later[0].data_ptr() == weight.data_ptr()


def test_what_hooks_have_set_in_callbacks_and_data_of_one_class_comes_back_to_each(tmp_path: Path) -> None:
    class Counts(Callback):
        def __init__(self, by: int) -> None:
            self.by, self.total = by, 0

        def on_train_batch_start(self, *args: Any) -> None:
            self.total += self.by

    class Rows(Dataset[Tensor]):
        read = 0

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            self.read += 1
            return torch.full((2,), float(index))

    def run(callbacks: list[Any], path: Path | None) -> list[int]:
        data: list[Any] = [DataLoader(Rows(), batch_size=size) for size in (1, 4)]
        counts = [Counts(1), Counts(10)]
        trainer(max_epochs=2, callbacks=[*counts, *callbacks]).fit(Small(), data, ckpt_path=path)
        return [each.total for each in counts] + [each.dataset.read for each in data]

    assert_resumes(run, tmp_path, ["on_train_batch_end"], calls=[7])


def test_objects_that_lack_are_named(tmp_path: Path) -> None:
    class Meter:
        total = 0

    class Module(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 0:
                self.meter = Meter()
            if hasattr(self, "meter"):
                self.meter.total += 1

    with pytest.warns(UserWarning, match=r"lacks what the checkpoint cannot hold: Module\.meter"):
        resumed(Module, tmp_path)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors(tmp_path: Path) -> None:
    """A buffer whose entries become more, and an attribute; either would be too large in dense memory."""

    def entry(place: int) -> Tensor:
        return torch.sparse_coo_tensor(torch.tensor([[place], [0]]), torch.ones(1), (100_000, 100_000))

    class Module(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("graph", entry(0), persistent=False)
            self.row = torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1 << 30))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.graph.add_(entry(1 + self.global_step))
            self.row.values().mul_(2)

    module = resumed(Module, tmp_path)
    assert module.graph.coalesce().indices()[0].tolist() == [0, 1, 2, 3, 4]
    assert module.row.values().tolist() == [2**4]


def test_large_data_are_no_state(tmp_path: Path) -> None:
    class Module(Small):
        def on_train_epoch_start(self) -> None:
            self.trainer.train_dataloader.dataset.more = torch.zeros(1 << 20)

    run = trainer()
    run.fit(Module(), loader())
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert (tmp_path / "x.ckpt").stat().st_size < 1 << 20


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # where other tests have left threads
def test_persistent_workers_that_learn_no_epoch_are_named() -> None:
    class ByEpoch(Stream):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    data = DataLoader(ByEpoch(4), batch_size=2, num_workers=1, persistent_workers=True)
    with pytest.warns(UserWarning, match="does not reach the workers") as warned:
        trainer(max_epochs=3).fit(Small(), data)
    assert len([each for each in warned if "does not reach" in str(each.message)]) == 1
    assert ByEpoch.epochs == [0, 1, 2]


@pytest.mark.parametrize(
    "saves_at", [{"every_n_train_steps": 1}, {"every_n_epochs": 1, "save_on_train_epoch_end": False}], ids=str
)
def test_a_hook_of_the_module_after_the_checkpoint_was_written_is_called(
    saves_at: dict[str, Any], tmp_path: Path
) -> None:
    """Its arguments, modes, random numbers and logged values are those of the undisturbed run."""

    class Module(Small):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.calls.append(
                [outputs["loss"].item(), batch[0].tolist(), batch_idx, self.training, torch.rand(1).item()]
            )
            self.log("sum", batch[0].sum(), on_epoch=True, on_step=False)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def on_validation_end(self) -> None:
            self.calls.append([self.training, torch.is_grad_enabled(), torch.rand(1).item()])

    def fit(folder: str, path: Path | None = None) -> Any:
        module, saves = Module(), ModelCheckpoint(tmp_path / folder, save_top_k=-1, **saves_at)
        run = trainer(max_epochs=2, val_check_interval=1, callbacks=[saves], enable_checkpointing=True)
        run.fit(module, loader(2), loader(1), ckpt_path=path)
        return module.calls, run.callback_metrics["sum"]

    expected = fit("whole")
    for name in ("epoch=1-step=3", "epoch=1-step=4"):
        assert fit(name, tmp_path / "whole" / f"{name}.ckpt") == expected


def test_callbacks_behind_one_that_saves_see_its_batch_in_a_resumed_run(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2 and not (tmp_path / "x.ckpt").exists():
                trainer.save_checkpoint(tmp_path / "x.ckpt")

    class Losses(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            self.seen.append(outputs["loss"].item())

    def fit(path: Path | None = None) -> list[float]:
        trainer(callbacks=[Saves(), losses := Losses()]).fit(Small(), loader(3), ckpt_path=path)
        return losses.seen

    assert fit() == fit(tmp_path / "x.ckpt")  # the list comes back, without the second batch


def test_a_hook_whose_batch_a_file_cannot_hold_is_named(tmp_path: Path) -> None:
    class Batch:
        def __init__(self, rows: Any) -> None:
            self.rows = torch.stack([features for (features,) in rows])

    class Module(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch.rows, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.last = batch_idx

    def fit(path: Path | None = None) -> None:
        saves = ModelCheckpoint(tmp_path / f"resumed {path is not None}", save_top_k=-1, every_n_train_steps=1)
        data = DataLoader(loader(2).dataset, batch_size=2, collate_fn=Batch)
        trainer(max_epochs=1, callbacks=[saves], enable_checkpointing=True).fit(Module(), data, ckpt_path=path)

    fit()
    with pytest.warns(UserWarning, match="does not finish `on_train_batch_end` of batch 0"):
        fit(tmp_path / "resumed False" / "epoch=0-step=1.ckpt")
