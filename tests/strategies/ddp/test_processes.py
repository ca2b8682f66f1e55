"""Objects that travel to processes and come home, and messages where processes cannot start or do not agree."""

import logging
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import ConfigurationError, DDPStrategy
from equipoise.parallel.communication.process_group import joined
from equipoise.parallel.communication.rank import Rank
from tests.strategies.runs import assert_trains_alike, fit, trainer
from tests.support.failures import Mistake, raises
from tests.support.networks.numbered import Numbered, Samples, numbered
from tests.support.waiting import wait_briefly

pytestmark = pytest.mark.filterwarnings("ignore:No (positive|negative) samples")

# What comes home


class Remembers(L.Callback):
    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.lock: Any = None

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append(trainer.current_epoch)
        self.module = module
        self.lock = threading.Lock()  # cannot be sent


@pytest.mark.thorough
def test_the_callers_objects_hold_the_result(tmp_path: Path) -> None:
    module, callback, data = numbered(), Remembers(), DataLoader(Samples(8), batch_size=2)
    tensors, before = list(module.parameters()), [parameter.detach().clone() for parameter in module.parameters()]
    run = trainer(callbacks=[callback], enable_checkpointing=True, default_root_dir=str(tmp_path))
    run.fit(module, data, DataLoader(Samples(5), batch_size=2))
    for earlier, tensor, parameter in zip(before, tensors, module.parameters(), strict=True):
        assert tensor is parameter
        assert not torch.equal(earlier, parameter)
    assert callback.epochs == [0, 1]
    assert callback.module is module
    assert callback.lock is None
    assert (run.current_epoch, run.global_step, run.state.finished) == (2, 4, True)
    assert {"loss", "val_loss", "accuracy"} <= run.callback_metrics.keys()
    assert Path(run.checkpoint_callback.best_model_path).exists()
    run.save_checkpoint(tmp_path / "own.ckpt")
    assert torch.load(tmp_path / "own.ckpt", weights_only=True)["global_step"] == 4
    run.fit_loop.max_epochs = 3
    run.fit(module, data)
    assert run.current_epoch == 3


def test_the_callers_generators_continue_where_the_first_process_ended() -> None:
    later = []
    for strategy, devices in (("single_device", 1), ("ddp", 2)):
        torch.manual_seed(5)
        fit(Numbered(), strategy, devices, 8)
        later.append(float(torch.rand(())))
    assert later[0] == later[1]


class Locked(nn.Identity):
    """Cannot be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class MadeInTheRun(Numbered):
    """Makes layers in the run, of which one cannot be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(3)
            self.net = nn.Sequential(Locked(), nn.Linear(4, 3))


def test_layers_made_in_the_run_come_home() -> None:
    many = assert_trains_alike(MadeInTheRun)
    assert len(list(many.parameters())) == 2
    # Else the next run would make them anew.
    assert many.net is dict(many.named_children())["net"]


def test_the_first_process_logs_for_the_program(caplog: pytest.LogCaptureFixture) -> None:
    class Talks(Numbered):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logging.getLogger("mine").info("step %d of rank %d", batch_idx, self.global_rank)
            return super().training_step(batch, batch_idx)

    with caplog.at_level(logging.INFO, logger="mine"):
        fit(Talks(), max_epochs=1)
    told = [record.getMessage() for record in caplog.records if record.name == "mine"]
    assert told == [f"step {index} of rank 0" for index in range(4)]


def test_data_sets_travel_in_shared_memory() -> None:
    """Workers read the caller's memory, mapped, not a copy in each of them."""

    class Large(Numbered):
        mapped = 0

        def on_train_start(self) -> None:
            tensor: Tensor = self.trainer.train_dataloader.dataset.tensors[0]
            address = tensor.untyped_storage().data_ptr()
            with open("/proc/self/maps") as file:
                for line in file:
                    begin, end = (int(each, 16) for each in line.split()[0].split("-"))
                    if begin <= address < end:
                        self.mapped = int("equipoise" in line)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).square().mean()

    module = Large()
    trainer().fit(module, DataLoader(TensorDataset(torch.randn(1000, 4, dtype=torch.float64)), batch_size=500))
    assert module.mapped == 1


# Where processes do not agree


def test_a_checkpoint_on_an_error_does_not_wait_for_processes_that_do_not_know_of_it(tmp_path: Path) -> None:
    class Fails(Numbered):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1 and self.global_rank == 0:
                raises()
            return super().training_step(batch, batch_idx)

    with pytest.raises(Mistake, match="on purpose"):
        fit(Fails(), callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    assert (tmp_path / "on_exception.ckpt").exists()


@pytest.mark.thorough
def test_processes_that_wait_in_different_places_are_named() -> None:
    class WaitsAlone(Numbered):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            wait_briefly()
            if self.global_rank == 1:
                self.trainer.strategy.barrier()

    with pytest.raises(Exception, match=r"waited for others|hung, while others waited"):
        fit(WaitsAlone(), DDPStrategy(timeout=300))


# Refusals


class Unsendable(Numbered):
    def __init__(self) -> None:
        super().__init__()
        self.stream = iter(x for x in range(3))


class DiffersInShape(Numbered):
    def configure_model(self) -> None:
        self.extra = nn.Linear(2, 2 + self.global_rank)


class DiffersInNumber(Numbered):
    def configure_model(self) -> None:
        if self.global_rank == 1:
            self.extra = nn.Linear(2, 2)


class Lazy(Numbered):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LazyLinear(3)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Unsendable, {}, r"^Unsendable\.stream is a generator, which cannot be sent"),
        (DiffersInNumber, {}, r"differs between processes: rank 0 has \d+ tensors, rank 1 has \d+ tensors"),
        (DiffersInShape, {}, r"rank 0 has extra\.weight of shape \[2, 2\], .*, rank 1 has .* of shape \[3, 2\]"),
        (Lazy, {}, r"net\.weight has no shape yet"),
        (Numbered, {"sync_batchnorm": True}, r"sync_batchnorm=True needs CUDA devices"),
    ],
)
def test_modules_that_processes_cannot_train_are_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(make(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "own"}, "engine must be 'torch' or 'native'"),
        ({"shares": [0, 0]}, "shares must be 'auto' or a number from 0"),
        ({"shares": [1, 2, 3]}, "3 numbers, but there are 2 processes"),
        ({"timeout": 0}, "timeout is a positive number"),
        ({"bucket_megabytes": 0}, "bucket_megabytes must be positive"),
        ({"engine": "native", "comm_hook": print}, "comm_hook is for torch's wrapper"),
    ],
)
def test_arguments_of_the_strategy_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer(DDPStrategy(**options))


def test_an_address_to_meet_at_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    group = joined(Rank(0, 0, 0, 2), torch.device("cpu"), timeout=timedelta(seconds=300))
    with pytest.raises(ConfigurationError, match="but not MASTER_ADDR and MASTER_PORT"), group:
        pass


def test_a_port_that_another_program_has_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", port)
        group = joined(Rank(0, 0, 0, 2), torch.device("cpu"), timeout=timedelta(seconds=300))
        with pytest.raises(ConfigurationError, match=f"MASTER_PORT={port} is taken by another program"), group:
            pass
