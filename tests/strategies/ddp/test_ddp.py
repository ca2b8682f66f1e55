"""DDP in real processes over gloo: launched, exact, and home again."""

import csv
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from equipoise import ConfigurationError, DDPStrategy, StepError, Trainer
from equipoise.strategies.ddp.exchange import torch_engine
from equipoise.strategies.distributed import window_totals
from tests.strategies.ddp.test_faults import Mistake, raises
from tests.support.networks.transparency import Base, Masked, MaskedOnTheHost, Mlp, Recurrent, Tied
from tests.support.one_device import OPTIONS, assert_same_run, train
from tests.support.pipelines import quiet

pytestmark = pytest.mark.filterwarnings("ignore:No (positive|negative) samples", r"ignore:`fit\(ckpt_path='last'\)`")


# The first promise


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("engine", ["torch", "native"])
@pytest.mark.parametrize("make", [Mlp, Recurrent, Tied, Masked, MaskedOnTheHost], ids=lambda make: make.__name__)
def test_gradients_are_those_of_one_device(make: type[Base], engine: Any) -> None:
    """A step of two processes is a window of two batches; the last has a batch for one of them alone."""
    one = train(make, "single_device", 1, accumulate_grad_batches=2)
    assert_same_run(one, train(make, DDPStrategy(engine=engine), 2))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("engine", ["torch", "native"])
@pytest.mark.parametrize("options", ["accumulated", "clipped", "accumulated and clipped by value"])
def test_with_options(options: str, engine: Any) -> None:
    given = OPTIONS[options]
    more = {**given, "accumulate_grad_batches": 3 * given.get("accumulate_grad_batches", 1)}
    assert_same_run(train(Masked, "single_device", 1, **more), train(Masked, DDPStrategy(engine=engine), 3, **given))


class Samples(Dataset[Any]):
    """Numbered samples."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(11)
        self.features, self.labels = torch.randn(count, 4, dtype=torch.float64), torch.randint(3, (count,))

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> Any:
        return self.features[index], self.labels[index], index


def has_same_weights_everywhere(module: L.LightningModule) -> bool:
    """Return True if the module has the same bits in all processes."""
    first, *others = module.trainer.strategy.gather_objects([p.detach().clone() for p in module.parameters()])
    return all(all(map(torch.equal, first, other)) for other in others)


class Numbered(L.LightningModule):
    """Remembers which samples it saw, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.accuracy, self.auroc = MulticlassAccuracy(3), BinaryAUROC()
        self.seen: list[list[list[int]]] = []
        self.same = True

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen[-1].append(batch[2].tolist())
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen[-1] = self.trainer.strategy.gather_objects(self.seen[-1])
        self.same = self.same and has_same_weights_everywhere(self)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        self.accuracy(logits, batch[1])
        self.auroc(logits[:, 0].sigmoid(), batch[1] == 0)
        self.log("accuracy", self.accuracy)
        self.log("auroc", self.auroc)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[2]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(strategy: Any, devices: int, **options: Any) -> Trainer:
    return quiet(strategy=strategy, devices=["cpu"] * devices, **{"max_epochs": 2, **options})


def numbered() -> Numbered:
    torch.manual_seed(3)
    return Numbered()


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for expected, actual in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(expected, actual, rtol=1e-12, atol=1e-13)


def assert_trains_alike(make: Callable[[], Numbered], strategy: Any = "ddp", count: int = 12) -> None:
    """See that two processes train as one device does on batches twice as large."""
    one, many = make(), make()
    many.load_state_dict(one.state_dict())
    trainer("single_device", 1).fit(one, DataLoader(Samples(count), batch_size=4))
    trainer(strategy, 2).fit(many, DataLoader(Samples(count), batch_size=2))
    assert_same_weights(one, many)
    assert many.same


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("count", "processes"), [(13, 2), (13, 3), (4, 3), (12, 3), (2, 3)])
@pytest.mark.parametrize("shares", [False, True])
def test_each_sample_once(count: int, processes: int, shares: bool) -> None:
    module = numbered()
    strategy = DDPStrategy(shares=[3, 1, 2][:processes] if shares else None)
    run = trainer(strategy, processes)
    run.fit(module, DataLoader(Samples(count), batch_size=2, shuffle=True))
    assert len(module.seen) == 2
    for epoch in module.seen:
        drawn = [index for process in epoch for batch in process for index in batch]
        assert sorted(drawn) == list(range(count))
    if count > 4:
        assert module.seen[0] != module.seen[1]  # shuffled anew
    assert module.same
    assert run.global_step == 2 * -(-count // (2 * processes))


def test_uneven_shares_are_exact() -> None:
    one, many = numbered(), numbered()
    trainer("single_device", 1).fit(one, DataLoader(Samples(13), batch_size=6))
    strategy = DDPStrategy(shares=[0.5, 1.5])
    trainer(strategy, 2).fit(many, DataLoader(Samples(13), batch_size=3))
    assert [len(batch) for batch in many.seen[0][1]] == [4, 4, 1]
    assert_same_weights(one, many)


def test_a_sampler_of_the_users_own() -> None:
    module, weights = numbered(), [1.0] * 10
    sampler = WeightedRandomSampler(weights, 10, replacement=False)
    trainer("ddp", 2, max_epochs=1).fit(module, DataLoader(Samples(10), batch_size=2, sampler=sampler))
    drawn = [index for process in module.seen[0] for batch in process for index in batch]
    assert sorted(drawn) == list(range(10))


class Stream(IterableDataset[Any]):
    """Samples without a length, shared out unevenly."""

    def __init__(self, indices: list[int]) -> None:
        self.indices, self.samples = indices, Samples(13)

    def __iter__(self) -> Any:
        return (self.samples[index] for index in self.indices)

    def shard(self, num_shards: int, index: int) -> "Stream":
        return Stream(self.indices[:9] if index == 0 else self.indices[9:])


def test_a_stream_that_shares_itself_out() -> None:
    module = numbered()
    run = trainer(DDPStrategy(engine="native"), 2)
    stream = DataLoader(Stream(list(range(13))), batch_size=2)
    run.fit(module, stream, stream)
    for epoch in module.seen:
        assert epoch == [[[0, 1], [2, 3], [4, 5], [6, 7], [8]], [[9, 10], [11, 12]]]
    assert module.same
    assert run.global_step == 10
    expected = trainer("single_device", 1).validate(module, DataLoader(Samples(13), batch_size=2), verbose=False)
    assert run.callback_metrics["val_loss"] == pytest.approx(expected[0]["val_loss"])


def test_a_stream_that_cannot_share_itself_out() -> None:
    class Plain(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Samples(4))

    with pytest.raises(ConfigurationError, match=r"Plain is an IterableDataset.*`shard\(num_shards, index\)`"):
        trainer("ddp", 2).fit(numbered(), DataLoader(Plain(), batch_size=2))


def test_loaders_left_alone() -> None:
    module = numbered()
    run = trainer("ddp", 2, use_distributed_sampler=False, max_epochs=1)
    run.fit(module, DataLoader(Samples(4), batch_size=2))
    assert module.seen == [[[[0, 1], [2, 3]], [[0, 1], [2, 3]]]]


# Evaluation


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 11])
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.filterwarnings("ignore:No (positive|negative) samples")
def test_evaluations_are_those_of_one_device(count: int, processes: int) -> None:
    module = numbered()
    loader = DataLoader(Samples(count), batch_size=2)
    expected = trainer("single_device", 1).validate(module, loader, verbose=False)
    run = trainer("ddp", processes)
    actual = run.validate(module, loader, verbose=False)
    assert actual[0].keys() == expected[0].keys() == {"val_loss", "accuracy", "auroc"}
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    assert run.callback_metrics["val_loss"] == pytest.approx(expected[0]["val_loss"])


@pytest.mark.parametrize("count", [1, 5, 9])
def test_predictions_come_in_the_order_of_the_data(count: int) -> None:
    loader = DataLoader(Samples(count), batch_size=2)
    predicted = trainer("ddp", 3).predict(numbered(), loader)
    assert predicted is not None
    assert torch.cat(predicted).tolist() == list(range(count))


# What comes home


class Remembers(L.Callback):
    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.file: Any = None

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append(trainer.current_epoch)
        self.module = module
        self.file = threading.Lock()  # cannot be sent


def test_the_callers_objects_hold_the_result(tmp_path: Path) -> None:
    module, callback = numbered(), Remembers()
    before = [p.detach().clone() for p in module.parameters()]
    tensors = list(module.parameters())
    run = trainer("ddp", 2, callbacks=[callback], enable_checkpointing=True, default_root_dir=str(tmp_path))
    run.fit(module, DataLoader(Samples(8), batch_size=2), DataLoader(Samples(5), batch_size=2))
    assert all(a is b for a, b in zip(tensors, module.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert callback.epochs == [0, 1]
    assert callback.module is module
    assert callback.file is None
    assert (run.current_epoch, run.global_step) == (2, 4)
    assert run.state.finished
    assert {"loss", "val_loss", "accuracy"} <= run.callback_metrics.keys()
    assert Path(run.checkpoint_callback.best_model_path).exists()
    run.save_checkpoint(tmp_path / "own.ckpt")
    assert torch.load(tmp_path / "own.ckpt", weights_only=True)["global_step"] == 4
    run.fit_loop.max_epochs = 3
    run.fit(module, DataLoader(Samples(8), batch_size=2))
    assert run.current_epoch == 3


# Failures


def test_unused_parameters_are_named() -> None:
    class Unused(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(2, 2)

    with pytest.raises(StepError, match=r"spare\.weight, spare\.bias.*find_unused_parameters=True"):
        trainer("ddp", 2).fit(Unused(), DataLoader(Samples(8), batch_size=2))
    for strategy in (DDPStrategy(find_unused_parameters=True), DDPStrategy(engine="native")):
        trainer(strategy, 2).fit(Unused(), DataLoader(Samples(7), batch_size=2))


def test_what_cannot_be_sent_is_named() -> None:
    module = numbered()
    module.stream = iter(x for x in range(3))
    with pytest.raises(ConfigurationError, match=r"^Numbered\.stream is a generator, which cannot be sent"):
        trainer("ddp", 2).fit(module, DataLoader(Samples(8), batch_size=2))


def test_modules_that_differ_are_refused() -> None:
    class Differs(Numbered):
        def configure_model(self) -> None:
            if self.global_rank == 1:
                self.extra = nn.Linear(2, 2)

    with pytest.raises(ConfigurationError, match=r"Differs differs between processes: rank 0 has .* rank 1 has"):
        trainer("ddp", 2).fit(Differs(), DataLoader(Samples(8), batch_size=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "own"}, "engine must be 'torch' or 'native'"),
        ({"shares": [0, 0]}, "shares must be 'auto' or a number from 0"),
        ({"timeout": 0}, "timeout is a positive number"),
        ({"bucket_megabytes": 0}, "bucket_megabytes must be positive"),
        ({"engine": "native", "comm_hook": print}, "comm_hook is for torch's wrapper"),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DDPStrategy(**options)
    with pytest.raises(ConfigurationError, match="3 numbers, but there are 2 processes"):
        trainer(DDPStrategy(shares=[1, 2, 3]), 2)


def test_the_callers_generators_continue_where_the_first_process_ended() -> None:
    later = []
    for strategy, devices in (("single_device", 1), ("ddp", 2)):
        torch.manual_seed(5)
        trainer(strategy, devices).fit(Numbered(), DataLoader(Samples(8), batch_size=4 // devices))
        later.append(float(torch.rand(())))
    assert later[0] == later[1]


def test_datasets_travel_in_shared_memory() -> None:
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
    trainer("ddp", 2).fit(module, DataLoader(TensorDataset(torch.randn(1000, 4, dtype=torch.float64)), batch_size=500))
    assert module.mapped == 1


# Where processes do not do the same


@pytest.mark.parametrize("engine", ["torch", "native"])
def test_callbacks_that_decide_together(engine: Any, tmp_path: Path) -> None:
    """In the last step one process has no batch: it saves, looks at the clock and logs with the others."""

    class Logs(Numbered):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("synced", float(batch[2].sum()), sync_dist=True, reduce_fx="sum", on_epoch=False)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("checked", batch[2].double().mean(), on_step=True, on_epoch=True, sync_dist=True)

    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    logger = CSVLogger(tmp_path, version=0)
    run = trainer(
        DDPStrategy(engine=engine),
        2,
        callbacks=[checkpoint],
        enable_checkpointing=True,
        max_time="00:01:00:00",
        logger=logger,
        log_every_n_steps=1,
        max_epochs=1,
    )
    run.fit(Logs(), DataLoader(Samples(9), batch_size=2), DataLoader(Samples(5), batch_size=2))
    assert run.global_step == 3
    assert len(list(tmp_path.glob("*.ckpt"))) == 3
    assert run.callback_metrics["checked"] == 2
    assert Path(run.log_dir) == Path(logger.log_dir)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [row["synced"] for row in csv.DictReader(file) if row["synced"]]
    assert [float(row) for row in rows] == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7, 8]


def test_the_first_part_of_a_process_weighs_nothing() -> None:
    class Empty(Numbered):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
            keep = (batch[2] != 1) & (batch[2] != 3)  # all of the second process's first batch
            return {"loss": (losses * keep).sum() / keep.sum().clamp(min=1), "loss_weight": int(keep.sum())}

    assert_trains_alike(Empty, count=10)


@pytest.mark.parametrize("engine", ["torch", "native"])
def test_a_step_without_any_weight_moves_nothing(engine: Any) -> None:
    class Skips(Numbered):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)

    assert_trains_alike(Skips, DDPStrategy(engine=engine))


class OnADevice(Numbered):
    """Computes as on a device that the host must not wait for; where `skipped`, all processes skip a step.

    Args:
        skipped: The batches in which the step returns nothing.
        masked: The batches from which on the weight is a tensor, as a number of tokens is.
    """

    def __init__(self, skipped: tuple[int, ...], masked: int) -> None:
        super().__init__()
        self.skipped, self.masked = skipped, masked

    def setup(self, stage: str) -> None:
        if self.trainer.world_size > 1:
            torch_engine.reading_waits = window_totals.reading_waits = lambda device: True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx in self.skipped:
            return None
        losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        if batch_idx < self.masked:
            return losses.mean()
        keep = batch[2] % 3 > 0
        return {"loss": (losses * keep).sum() / keep.sum().clamp(min=1), "loss_weight": keep.sum()}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


@pytest.mark.parametrize(("skipped", "masked"), [((2, 3), 9), ((1, 4), 2)])
def test_a_total_weight_that_the_host_can_know_without_the_device(skipped: tuple[int, ...], masked: int) -> None:
    assert_trains_alike(partial(OnADevice, skipped, masked), count=22)


@pytest.mark.parametrize("engine", ["torch", "native"])
def test_parameters_that_begin_to_learn(engine: Any) -> None:
    class Thaws(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            super().on_train_epoch_start()
            self.net[0].requires_grad_(self.current_epoch > 0)

    assert_trains_alike(Thaws, DDPStrategy(engine=engine))


def test_gradients_are_whole_after_the_backward() -> None:
    class Clips(Numbered):
        def on_after_backward(self) -> None:
            for parameter in self.parameters():
                parameter.grad.clamp_(-0.01, 0.01)

    module = Clips()
    trainer(DDPStrategy(engine="native"), 2).fit(module, DataLoader(Samples(12), batch_size=2))
    assert module.same


def test_a_distributed_sampler_of_the_users_own_in_an_evaluation() -> None:
    module = numbered()

    class Data(L.LightningDataModule):
        def val_dataloader(self) -> Any:
            sampler: Any = DistributedSampler(range(8), 2, self.trainer.global_rank, shuffle=False)
            return DataLoader(Samples(8), batch_size=2, sampler=sampler)

    expected = trainer("single_device", 1).validate(module, DataLoader(Samples(8), batch_size=2), verbose=False)
    actual = trainer("ddp", 2).validate(module, datamodule=Data(), verbose=False)
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)


def test_a_checkpoint_on_an_error(tmp_path: Path) -> None:
    """The process that fails does not wait for those that do not know yet."""

    class Fails(Numbered):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1 and self.global_rank == 0:
                raises()
            return super().training_step(batch, batch_idx)

    run = trainer("ddp", 2, callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    with pytest.raises(Mistake, match="on purpose"):
        run.fit(Fails(), DataLoader(Samples(8), batch_size=2))
    assert (tmp_path / "on_exception.ckpt").exists()


def test_manual_optimisation_needs_a_batch_everywhere() -> None:
    class Manual(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    assert_trains_alike(Manual, count=8)
    data = DataLoader(Samples(9), batch_size=2)
    with pytest.raises(ConfigurationError, match=r"have 3 and 2 batches.*optimises by hand.*limit_train_batches=2"):
        trainer("ddp", 2).fit(Manual(), data)
    # The steps may be over before.
    trainer("ddp", 2, max_steps=2).fit(Manual(), data)
    with pytest.raises(StepError, match=r"optimises by hand.*drop_last=True"):
        trainer("ddp", 2, max_steps=3).fit(Manual(), data)


def test_shared_batch_statistics_are_refused_on_the_cpu() -> None:
    with pytest.raises(ConfigurationError, match=r"sync_batchnorm=True needs CUDA devices"):
        trainer("ddp", 2, sync_batchnorm=True).fit(numbered(), DataLoader(Samples(4), batch_size=2))
