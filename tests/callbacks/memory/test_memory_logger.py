"""Readings by phase, steps in detail, growth: in our trainer and in Lightning's, on one device and several."""

import csv
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Callback, ConfigurationError, MemoryLogger, OOMRecovery, Trainer
from equipoise.callbacks.memory import memory_logger, phase_readings
from equipoise.extensions.leaks import watch
from equipoise.extensions.leaks.watch import FROZEN_BY_PYTHON, LeakWatch
from equipoise.memory.devices import MemoryReading
from tests.support.trainer_runs import trainer as quiet

OURS = ["batch to device", "forward", "backward", "optimizer step"]


class Model(L.LightningModule):
    """A small network.

    Args:
        after_loss: Called with the module and the loss of each training step.
    """

    def __init__(self, after_loss: Callable[[Any, Tensor], Any] = lambda module, loss: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
        self.kept: list[Tensor] = []
        self.after_loss = after_loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).pow(2).mean()
        self.after_loss(self, loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layer(batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class ByHand(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch[0]).pow(2).mean())
        optimizer.step()


def keep(module: Any, loss: Tensor) -> None:
    module.kept.append(loss)


def data(batches: int = 10, size: int = 4) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(batches * size, 6)), batch_size=size)


def fit(memory: MemoryLogger, module: L.LightningModule | None = None, *, batches: int = 10, **options: Any) -> Any:
    cls = options.pop("trainer_type", Trainer)
    callbacks = [memory, *options.pop("callbacks", [])]
    trainer = quiet(cls, callbacks=callbacks, **{"num_sanity_val_steps": 0, **options})
    trainer.fit(module or Model(), data(batches), data(2))
    return trainer


def logged(memory: MemoryLogger, *arguments: Any, **options: Any) -> MemoryLogger:
    """The logger, after a fit."""
    fit(memory, *arguments, **options)
    return memory


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def nothing_set_aside() -> Iterator[None]:
    """Let collections look through all objects, as they do for users; it takes most of the time of a test."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


# Readings


@pytest.mark.thorough
@pytest.mark.parametrize(("trainer_type", "phases"), [(Trainer, OURS), (L.Trainer, OURS[1:])])
def test_every_phase_of_the_chosen_batches_is_read_and_no_sanity_check(trainer_type: Any, phases: list[str]) -> None:
    memory = MemoryLogger(every_n_steps=4)
    for _ in range(2):  # the second begins anew
        fit(memory, trainer_type=trainer_type, num_sanity_val_steps=2)
    training = [point for point in memory.timeline if point.phase != "evaluation"]
    assert [(point.step, point.phase) for point in training] == [
        (step, phase) for step in (1, 5, 9) for phase in phases
    ]
    assert [point.phase for point in memory.timeline if point not in training] == ["evaluation"]
    assert all(point.allocated > 2**20 and point.device == "cpu" and point.reserved is None for point in training)
    seconds = [point.seconds for point in memory.timeline]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0


def test_a_phase_without_a_step_of_the_optimiser_is_not_read_as_one() -> None:
    memory = logged(MemoryLogger(every_n_steps=1), accumulate_grad_batches=5)
    assert sum(point.phase == "optimizer step" for point in memory.timeline) == 2
    assert sum(point.phase == "backward" for point in memory.timeline) == 10


def test_readings_go_to_the_loggers_in_mebibytes(tmp_path: Path) -> None:
    memory = logged(
        MemoryLogger(every_n_steps=5, detail="modules"),
        logger=CSVLogger(tmp_path, name="", version=""),
        log_every_n_steps=1,
    )
    table = rows(tmp_path)
    values = [
        float(row["memory/cpu/backward/allocated_MiB"]) for row in table if row["memory/cpu/backward/allocated_MiB"]
    ]
    points = [point.allocated for point in memory.timeline if point.phase == "backward"]
    assert values == [pytest.approx(point / 2**20, abs=1e-3) for point in points]
    assert any(row["memory/cpu/batch_to_device/allocated_MiB"] for row in table)
    assert any(row["memory/cpu/evaluation/allocated_MiB"] for row in table)
    assert any(row["memory/cpu/peak/optimizer_state_MiB"] for row in table)


@pytest.mark.thorough
def test_the_progress_bar_shows_the_fullest_device() -> None:
    trainer = fit(MemoryLogger(every_n_steps=2, prog_bar=True))
    assert 0.05 < float(trainer.progress_bar_metrics["memory_GiB"]) < 50


def test_evaluations_alone_are_read() -> None:
    memory = MemoryLogger()
    trainer = quiet(callbacks=[memory])
    trainer.validate(Model(), data(2), verbose=False)
    assert [point.phase for point in memory.timeline] == ["evaluation"]


@pytest.mark.thorough
def test_long_time_lines_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase_readings, "_MOST_POINTS", 64)
    memory = logged(MemoryLogger(every_n_steps=1), max_epochs=12)
    assert len(memory.timeline) <= 68
    assert memory.timeline[-1].step == 120
    assert memory.timeline[0].step == 1
    steps = [point.step for point in memory.timeline]
    assert steps == sorted(steps)


def test_peaks_of_a_device_with_an_allocator_are_those_of_their_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readings as CUDA's allocator would give them, since there is none here."""
    state = {"allocated": 100, "peak": 0}

    def read(device: Any) -> MemoryReading:
        reading = MemoryReading(device=str(device), reserved=2**20, allocated=state["allocated"], peak=state["peak"])
        state["allocated"] += 10
        return reading

    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    monkeypatch.setattr(memory_logger, "_devices_of", lambda strategy: devices)
    monkeypatch.setattr(phase_readings, "read_memory", read)
    monkeypatch.setattr(phase_readings, "reset_peak", lambda device: state.update(peak=state["allocated"]))
    memory = MemoryLogger(every_n_steps=10)
    trainer = quiet(callbacks=[memory], logger=CSVLogger(tmp_path, name="", version=""))
    trainer.fit(Model(), data())
    expected = [(str(device), phase) for phase in OURS for device in devices]
    assert [(point.device, point.phase) for point in memory.timeline] == expected
    assert [point.allocated for point in memory.timeline] == list(range(100, 180, 10))
    assert [point.peak for point in memory.timeline] == [100, 100, 120, 120, 140, 140, 160, 160]
    (row,) = rows(tmp_path)
    assert float(row["memory/cuda:1/backward/reserved_MiB"]) == 1
    assert float(row["memory/imbalance"]) == pytest.approx(170 / 165)


# In detail


@pytest.mark.thorough
def test_the_ledger_of_a_step_in_detail() -> None:
    memory, module = MemoryLogger(detail="modules"), Model()
    fit(memory, module)
    (peak,) = memory.compositions
    assert peak.step == 1
    assert [composition.phase for composition in memory.phases] == ["forward", "backward", "optimizer step"]
    step = memory.phases[-1].totals()
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    assert step["parameter"] == step["gradient"] == parameters
    assert step["optimizer state"] == 2 * parameters + 4 * len(list(module.parameters()))
    assert step["batch"] == 4 * 6 * 4
    assert peak.nbytes == max(composition.nbytes for composition in memory.phases)
    assert {"layer.0", "layer.1", "layer.3"} <= {holder.module for holder in memory.phases[0].holders}


@pytest.mark.thorough
@pytest.mark.parametrize(("trainer_type", "module_type"), [(Trainer, ByHand), (L.Trainer, Model)])
def test_training_goes_on_as_without_the_logger(trainer_type: Any, module_type: type[Model]) -> None:
    def weights(callbacks: list[Any]) -> list[Tensor]:
        trainer = quiet(trainer_type, callbacks=callbacks, max_epochs=2, num_sanity_val_steps=0)
        module = module_type()
        torch.manual_seed(7)
        trainer.fit(module, data(), data(2))
        return list(module.state_dict().values())

    memory = MemoryLogger(every_n_steps=3, detail="modules", detail_steps=(0, 1, 7))
    assert all(map(torch.equal, weights([memory]), weights([])))
    assert memory.compositions


@pytest.mark.thorough
def test_an_accumulation_window_is_looked_at_as_a_whole() -> None:
    memory = logged(MemoryLogger(detail="modules", detail_steps=(1,)), accumulate_grad_batches=3)
    assert [composition.phase for composition in memory.phases] == ["forward", "backward", "optimizer step"]


@pytest.mark.thorough
def test_several_steps_leave_the_largest_peak() -> None:
    class Grows(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            large = torch.ones(1000 * (batch_idx + 1))
            return super().training_step(batch, batch_idx) + 0 * large.sum()

    memory = logged(MemoryLogger(detail="modules", detail_steps=(2, 5, 3)), Grows())
    assert [composition.step for composition in memory.compositions] == [5]


@pytest.mark.thorough
@pytest.mark.usefixtures("nothing_set_aside")
def test_a_failed_step_leaves_what_it_held_and_nothing_that_watches() -> None:
    """Both the watch of leaks and the ledger see each operation, and end in the reverse order of their beginning."""

    def fails(module: Any, loss: Tensor) -> None:
        large = torch.ones(5000)
        keep(module, loss)
        if module.global_step == 9:
            raise RuntimeError(f"no {large.shape}")

    memory = MemoryLogger(detail="modules", detail_steps=(9,))
    with pytest.raises(RuntimeError, match="no"):
        fit(memory, Model(fails))
    assert (5000,) in [holder.shape for holder in memory.compositions[0].holders]
    assert not is_in_torch_dispatch_mode()
    assert gc.get_freeze_count() <= FROZEN_BY_PYTHON


def test_a_step_done_again_in_parts_is_looked_at_as_well() -> None:
    def fails_once(module: Any, loss: Tensor) -> None:
        if module.global_step == 1 and not failures:
            failures.append(1)
            raise torch.OutOfMemoryError("out of memory")

    failures: list[int] = []
    with pytest.warns(UserWarning, match="ran out of memory"):
        memory = logged(MemoryLogger(detail="modules", every_n_steps=1), Model(fails_once), callbacks=[OOMRecovery()])
    assert memory.phases[-1].phase == "optimizer step"


def test_replicas_on_two_devices_are_read() -> None:
    memory = logged(MemoryLogger(every_n_steps=3, detail="modules"), strategy="dp", devices=["cpu", "cpu"])
    assert {point.phase for point in memory.timeline} == {*OURS, "evaluation"}
    assert memory.compositions[0].device == "cpu"


@pytest.mark.thorough
def test_readings_of_two_processes_and_their_imbalance(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "logger": logger, "log_every_n_steps": 1}
    memory = logged(MemoryLogger(every_n_steps=2), **options)
    others = [point for point in memory.timeline if point.device == "rank 1 cpu"]
    assert {point.phase for point in others} == {*OURS, "evaluation"}
    assert all(point.allocated > 2**20 for point in others)
    imbalance = [float(row["memory/imbalance"]) for row in rows(tmp_path) if row.get("memory/imbalance")]
    assert len(imbalance) == 1
    assert 1 <= imbalance[0] < 2


# Growth


@pytest.mark.thorough
def test_a_leak_is_named() -> None:
    message = r"Model\.kept keeps a tensor together with its graph.*test_memory_logger\.py:"
    with pytest.warns(UserWarning, match=message):
        memory = logged(MemoryLogger(), Model(keep), trainer_type=L.Trainer, max_epochs=2)
    assert [leak.holder for leak in memory.leaks] == ["Model.kept"]


def test_leaks_are_not_looked_for_without_leaks() -> None:
    memory = logged(MemoryLogger(leaks=False), Model(keep))
    assert not memory.leaks


@pytest.mark.thorough
def test_a_leak_of_another_callback_is_named() -> None:
    class Collects(Callback):
        def __init__(self) -> None:
            self.losses: dict[int, Tensor] = {}

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses[trainer.global_step] = pl_module.kept[0]

    model = Model(lambda module, loss: setattr(module, "kept", [loss]))
    with pytest.warns(UserWarning, match=r"Collects\.losses keeps"):
        fit(MemoryLogger(), model, callbacks=[Collects()], max_epochs=2)


@pytest.mark.slow
def test_a_data_set_that_remembers_is_no_leak() -> None:
    class Remembers(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.seen: dict[int, Tensor] = {}

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[Tensor]:
            self.seen[index] = torch.ones(2**18, 6)[:1]
            return (self.seen[index][0],)

    memory, data = MemoryLogger(), Remembers()
    quiet(callbacks=[memory], limit_val_batches=0).fit(Model(), DataLoader(data, batch_size=4))
    assert sum(tensor.untyped_storage().nbytes() for tensor in data.seen.values()) > 2**27
    assert not memory.leaks


@pytest.mark.thorough
@pytest.mark.parametrize("share", [1e9, 0.0])
def test_a_leak_that_begins_later_is_named(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an epoch, if looking once more is worth its time; else it is not looked for."""
    monkeypatch.setattr(watch, "_SHARE", share)

    def keep_later(module: Any, loss: Tensor) -> None:
        if module.global_step > 30:
            keep(module, loss)

    with pytest.warns(UserWarning, match=r"Model\.kept keeps") if share else nullcontext():
        memory = logged(MemoryLogger(), Model(keep_later), batches=120)
    assert len(memory.leaks) == bool(share)


@pytest.mark.slow
def test_what_an_earlier_run_has_left_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of its steps are as old as they are, in whichever step they were made."""
    monkeypatch.setattr(watch, "_SHARE", 1e9)
    with pytest.warns(UserWarning, match=r"Model\.kept keeps"):
        fit(MemoryLogger(), module := Model(keep), max_epochs=4)
    assert len(module.kept) == 40
    assert not logged(MemoryLogger(), max_epochs=8).leaks


@pytest.mark.thorough
@pytest.mark.usefixtures("nothing_set_aside")
def test_a_search_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, step: int) -> Any:
        raise OSError("no")

    monkeypatch.setattr(LeakWatch, "after_step", fails)
    with pytest.warns(UserWarning, match="growing memory failed: OSError: no"):
        trainer = fit(MemoryLogger())
    assert trainer.global_step == 10
    assert gc.get_freeze_count() <= FROZEN_BY_PYTHON


@pytest.mark.thorough
def test_several_steps_for_each_batch_are_looked_at_in_detail() -> None:
    class Twice(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            super().training_step(batch, batch_idx)

    for wanted, found in ((0, 0), (1, 2)):
        memory = MemoryLogger(detail="modules", detail_steps=(wanted,))
        fit(memory, Twice(), trainer_type=L.Trainer, batches=2)
        assert [composition.step for composition in memory.compositions] == [found]
        forward = memory.phases[0]
        assert forward.phase == "forward"
        assert "optimizer state" in forward.totals()  # that of the forward after the first step


# Arguments and hooks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be an integer of at least 1, not 0"),
        ({"detail": "all"}, "detail must be 'devices' or 'modules', not 'all'"),
        ({"detail_steps": [1]}, "detail_steps=.1. goes with detail='modules'"),
        ({"detail": "modules", "detail_steps": ()}, "names at least one step"),
        ({"detail_steps": [1, -1]}, "detail_steps are whole numbers from 0"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MemoryLogger(**arguments)


def test_the_hook_before_a_batch_goes_to_its_device() -> None:
    seen: list[str] = []

    class Notes(Callback):
        def on_before_batch_to_device(self, trainer: Any, pl_module: Any, batch_idx: int) -> None:
            seen.append(f"read {batch_idx}")

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(f"start {batch_idx}")

    class Transfers(Model):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            seen.append("transfer")
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    quiet(callbacks=[Notes()], max_steps=2).fit(Transfers(), data())
    assert seen == ["read 0", "transfer", "start 0", "read 1", "transfer", "start 1"]
