"""Hooks that log, draw or change the module: as on one device, or refused."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from equipoise import Trainer
from equipoise.errors import StepError
from equipoise.extensions.virtual.parts.part_batches import part_loader
from tests.extensions.virtual.test_faults import quiet_trainer
from tests.extensions.virtual.test_strategy import Noisy, SaveAfter, assert_equal, run
from tests.support.trainer_runs import refuses

pytestmark = pytest.mark.filterwarnings("ignore:The val loader shuffles")


class Direct(Noisy):
    """Its first layer reads rows as the loader returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, targets = batch
        outputs = self.net(features)
        loss = nn.functional.mse_loss(outputs, targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", outputs.mean())
        self.log("largest", outputs.max(), reduce_fx="max")
        return loss


@pytest.mark.slow
def test_rows_without_a_copy() -> None:
    assert_equal(run(Direct, 3), run(Direct, 1))


def test_each_part_has_memory_of_its_own() -> None:
    data = TensorDataset(torch.arange(138.0).view(23, 6), torch.arange(23))
    found = []
    for ranges in ([(0, 8)], [(0, 3), (3, 8)]):
        loaders = [part_loader(DataLoader(data, batch_size=23), 8, ranges, rank, 0) for rank in range(len(ranges))]
        found.append([part for loader in loaders for step in loader for part in step])
    for part, other in zip(*found, strict=True):
        assert part.key == other.key
        for one, another in zip(part.batch, other.batch, strict=True):
            assert torch.equal(one, another)
            assert not one.storage_offset()
            assert not another.storage_offset()


class LogsBackward(Noisy):
    """Logs around the backward of each part."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("before", loss.detach(), on_epoch=True)

    def on_after_backward(self) -> None:
        self.log("after", self.net[0].weight.grad.norm(), on_step=True, on_epoch=True)


@pytest.mark.slow
def test_logs_of_the_backward() -> None:
    state = run(LogsBackward, 2)
    assert {"before", "after_epoch"} <= state.keys()
    assert_equal(state, run(LogsBackward, 1))


class LogsAtBatchEnd(Noisy):
    """Logs each batch that its process evaluates."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("at_end", batch[0].mean())


class LogsList(Noisy):
    """Logs the mean of what its process has evaluated."""

    def on_validation_epoch_start(self) -> None:
        self.seen: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.seen.append(batch[0].mean())

    def on_validation_epoch_end(self) -> None:
        self.log("at_end", torch.stack(self.seen).mean())


class LogsFirstPart(Noisy):
    """Logs a value of the first part of its process."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("at_end", batch[0].mean(), on_epoch=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LogsAtBatchEnd, LogsList, LogsFirstPart])
def test_logs_of_one_process_are_refused(kind: type[Noisy]) -> None:
    with pytest.raises(StepError, match="logs 'at_end' with another value in each process"):
        run(kind, 2, num_sanity_val_steps=0)


class LogsAlike(Noisy):
    """Logs in hooks what all processes know; the first one logs a value for all."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("of_step", outputs["loss"])
        self.log("rate", 0.25 + batch_idx, on_epoch=True, batch_size=1)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("first", 0.5 / (1 + self.current_epoch), rank_zero_only=True)


class KeepsMonitored(L.Callback):
    """Keeps a value that one process has logged, in each of them."""

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        assert trainer.callback_metrics["first"] == 0.5 / (1 + trainer.current_epoch)


@pytest.mark.slow
def test_logs_of_hooks() -> None:
    options = {"callbacks": [L.pytorch.callbacks.EarlyStopping("first"), KeepsMonitored()], "num_sanity_val_steps": 0}
    state = run(LogsAlike, 2, **options)
    assert {"of_step", "rate_epoch", "first"} <= state.keys() | {"rate_epoch"}
    assert_equal(state, run(LogsAlike, 1, **options))


class Transferred(Noisy):
    """Augments batches once they are on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.rand(()), *batch[1:]]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("drawn", torch.rand(()))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_transfers_draw_alike(processes: int) -> None:
    assert_equal(run(Transferred, processes), run(Transferred, 1))


class DrawsInEvaluations(Noisy):
    """Draws in hooks of evaluated batches, and of training."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        torch.rand(())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("drawn", torch.rand(()))


@pytest.mark.slow
def test_hooks_of_evaluations_draw() -> None:
    options = {"val_check_interval": 2}
    assert_equal(run(DrawsInEvaluations, 2, **options), run(DrawsInEvaluations, 1, **options))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("ddp", "virtual"), ("virtual", "single_device"), ("virtual", "ddp")])
def test_other_strategies_do_not_continue_an_epoch(tmp_path: Path, first: str, second: str) -> None:
    path = tmp_path / "x.ckpt"
    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 1))

    def fit(strategy: str, devices: int, ckpt_path: Path | None = None, **options: Any) -> None:
        L.seed_everything(1, verbose=False)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "limit_val_batches": 0}
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=2, **quiet, **options)
        trainer.fit(Noisy(), DataLoader(data, batch_size=16), ckpt_path=ckpt_path)

    fit(first, 1, callbacks=[SaveAfter(2, path)])
    refuses(lambda: fit(second, 1, path), "another strategy", "orders and divides samples in another way")
    fit(first, 1, path)


class Momentum(Noisy):
    """Averages a copy of its weights in the step."""

    way = "in place"

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(6, 1).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            if self.way == "data":
                self.target.weight.data.mul_(0.9)
            elif self.way == "in place":
                self.target.weight.mul_(0.9).add_(self.seldom_used.weight, alpha=0.1)
            else:
                self.target.weight.data = self.target.weight.data * 0.9
        return super().training_step(batch, batch_idx)


class NewMomentum(Momentum):
    """The same by new data."""

    way = "new data"


class MomentumOfData(Momentum):
    """The same by `data`, whose changes torch does not count."""

    way = "data"


class ReadsGradients(Noisy):
    """Reads the gradient of an earlier batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.net[0].weight
        loss = super().training_step(batch, batch_idx)
        return loss if weight.grad is None else loss + weight.grad.sum()


class AssignsGradients(Noisy):
    """Assigns a gradient before the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[0].weight.grad = torch.ones_like(self.net[0].weight)
        return super().training_step(batch, batch_idx)


class Queue(Noisy):
    """A tensor that is no buffer and is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = torch.zeros(6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.queue.mul_(0.9).add_(batch[0].mean(0))
        return super().training_step(batch, batch_idx)


class CountsEvaluations(Noisy):
    """Counts evaluated batches in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("evaluated", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.evaluated += 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Momentum, "`training_step` changes 'target.weight'"),
        (NewMomentum, "`training_step` changes 'target.weight'"),
        (MomentumOfData, "`training_step` changes 'target.weight'"),
        (ReadsGradients, "`training_step` reads or changes the gradient of a parameter.*in a hook"),
        (AssignsGradients, "`training_step` assigns the gradient of a parameter.*in a hook"),
        (Queue, "changes the tensor 'queue' in place, which is no buffer.*Register it"),
        (CountsEvaluations, "An evaluation step changes 'evaluated'"),
    ],
)
def test_changes_in_steps_are_refused(kind: type[Noisy], message: str) -> None:
    with pytest.raises(StepError, match=message):
        run(kind, 1)


def test_parts_of_one_sample_are_named() -> None:
    message = "Part 0 of the step has one sample.*BatchNorm.*into 8 parts.*at least 16 samples.*smaller `count`"
    with pytest.raises(StepError, match=message):
        run(Noisy, 1, batch_size=8)


class GathersInEvaluation(Noisy):
    """Communicates in each evaluated batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.all_gather(batch[0].mean())


class GathersInBackward(Noisy):
    """Communicates in a hook of the backward."""

    def on_after_backward(self) -> None:
        self.all_gather(torch.zeros(()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GathersInEvaluation, GathersInBackward])
def test_communication_is_refused(kind: type[Noisy]) -> None:
    with pytest.raises(StepError, match="communicates with other processes"):
        run(kind, 2)


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Any:
        return iter([(torch.zeros(6), torch.zeros(1))] * 4)


@pytest.mark.slow
def test_evaluations_that_are_refused() -> None:
    refuses(lambda: run(Noisy, 2, val=[DataLoader(Stream(), batch_size=2)]), "evaluation to several processes")


def test_own_shares_are_refused() -> None:
    refuses(lambda: run(Noisy, 1, use_distributed_sampler=False), "use_distributed_sampler=False", "divides them")


def test_another_seed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    run(Noisy, 1, callbacks=[SaveAfter(3, path)])
    L.seed_everything(6, verbose=False)
    trainer = quiet_trainer()
    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 1))
    refuses(lambda: trainer.fit(Noisy(), DataLoader(data, batch_size=24), ckpt_path=path), "the seed 5")


class Threads(Noisy):
    """Notes the number of threads while it makes a layer."""

    def configure_model(self) -> None:
        self.threads = torch.get_num_threads()


def test_one_thread_from_the_beginning() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    module = Threads()
    try:
        data = TensorDataset(torch.randn(16, 6), torch.randn(16, 1))
        quiet_trainer().fit(module, DataLoader(data, batch_size=16))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert module.threads == 1


class FirstRankSkips(Noisy):
    """The first four parts of the first batch of a window have no weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        # The first part of a process is that of rank 0 in a step's first four parts.
        skipped = batch_idx % 3 == 0 and self.trainer.global_rank == 0 and len(self.parts_seen) < 4
        self.parts_seen.append(None)
        return {"loss": loss, "loss_weight": 0 if skipped else len(batch[0])}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Items of a list, unlike a number, are not set back before each part.
        self.parts_seen: list[None] = []


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 4])
def test_a_window_that_only_others_have_opened(tmp_path: Path, batches: int) -> None:
    path = tmp_path / "x.ckpt"
    options = {"accumulate_grad_batches": 3}
    run(FirstRankSkips, 2, callbacks=[SaveAfter(batches, path)], **options)
    assert_equal(run(FirstRankSkips, 2, ckpt_path=path, **options), run(FirstRankSkips, 1, **options))


class ByLbfgs(Direct):
    """An optimiser that computes a batch several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_a_batch_that_is_computed_again() -> None:
    """A window of one batch is computed as often as the optimiser asks; a longer one is refused."""
    data = TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
    quiet_trainer().fit(ByLbfgs(), DataLoader(data, batch_size=16))
    with pytest.raises(StepError, match="computes a batch again"):
        quiet_trainer(accumulate_grad_batches=2).fit(ByLbfgs(), DataLoader(data, batch_size=16))


class Counting(MeanMetric):
    """Counts beside its states."""

    seen = 0

    def update(self, *values: Any) -> None:
        self.seen += 1
        super().update(*values)


class CountsBeside(Noisy):
    """Logs such a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = Counting()


class CreatedInStep(Noisy):
    """Logs a metric that its first step creates."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "late"):
            self.late = MeanMetric()
        self.late.update(batch_idx)
        self.log("late", self.late)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "devices", "message"),
    [
        (CountsBeside, 1, "keeps 'seen' beside its states"),
        (CreatedInStep, 2, "logged as 'late' was created in a step"),
    ],
)
def test_metrics_that_cannot_be_merged_are_refused(module: Any, devices: int, message: str) -> None:
    with pytest.raises(StepError, match=message):
        run(module, devices)


class LogsNaN(Noisy):
    """Logs NaN with the number of samples of its process, which differs in the last batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("not_a_number", float("nan"), on_epoch=True, batch_size=len(batch[0]))


@pytest.mark.slow
def test_means_that_are_nan_everywhere_agree() -> None:
    assert torch.isnan(run(LogsNaN, 2)["not_a_number_epoch"])
