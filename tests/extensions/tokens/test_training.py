"""Runs whose batches have a budget of tokens equal a loop by hand, under every strategy, also after a kill."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from equipoise import (
    BalancedDataParallelStrategy,
    FSDPStrategy,
    OOMRecovery,
    PipelineStrategy,
    TokenBatchSampler,
    WorkerError,
)
from tests.extensions.tokens.sequences import mean_loss, model, padded, tokens
from tests.support.equality import assert_equal
from tests.support.trainer_runs import trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Batch .* ran out of memory", "ignore:The checkpoint holds"),
    pytest.mark.slow,
]

LENGTHS = torch.randint(1, 60, (150,), generator=torch.Generator().manual_seed(4)).tolist()
DATA = tokens(LENGTHS)
EPOCHS = 2


def loader(*, by_longest: bool = True, **options: Any) -> DataLoader[Any]:
    sampler = TokenBatchSampler(LENGTHS, 240, padded=by_longest, seed=2)
    return DataLoader(DATA, batch_sampler=sampler, collate_fn=padded, **options)


class Words(L.LightningModule):
    """Learns a word from another; the loss is a mean over tokens."""

    def __init__(self, most_samples: float = float("inf")) -> None:
        super().__init__()
        self.net = model()
        self.most_samples = most_samples

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if len(batch) > self.most_samples:
            raise torch.OutOfMemoryError("injected")
        loss, count = mean_loss(self.net, batch)
        return {"loss": loss, "loss_weight": count}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        # An epoch has as many steps as its length says: one more step would raise.
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def by_hand(batches_of_step: int, *, by_longest: bool = True) -> list[Tensor]:
    """Return the weights after training on the mean over the tokens of so many batches in each step."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    sampler: Any = loader(by_longest=by_longest).batch_sampler
    steps = EPOCHS * -(-len(sampler) // batches_of_step)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        for begin in range(0, len(batches), batches_of_step):
            step = batches[begin : begin + batches_of_step]
            samples = [DATA[index] for batch in step for index in batch]
            optimizer.zero_grad()
            mean_loss(net, padded(samples))[0].backward()
            optimizer.step()
            schedule.step()
    return list(net.state_dict().values())


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "windows": (3, {"accumulate_grad_batches": 3}),
    "ddp 2": (2, {"strategy": "ddp", "devices": 2}),
    "ddp 3": (3, {"strategy": "ddp", "devices": 3}),
    "ddp 2, windows": (4, {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 2}),
    "fsdp 2": (2, {"strategy": FSDPStrategy(), "devices": 2}),
    "balanced": (2, {"strategy": BalancedDataParallelStrategy(), "devices": 3, "accumulate_grad_batches": 2}),
    "dp": (1, {"strategy": "dp", "devices": 2}),
    "pipeline": (2, {"strategy": PipelineStrategy(), "devices": 2, "accumulate_grad_batches": 2}),
}


@pytest.mark.parametrize(
    ("name", "by_longest"),
    [*((name, True) for name in RUNS), ("windows", False), ("ddp 3", False), ("balanced", False)],
)
def test_runs_equal_a_loop_by_hand(name: str, by_longest: bool) -> None:
    batches_of_step, options = RUNS[name]
    module = Words()
    trainer(max_epochs=EPOCHS, **options).fit(module, loader(by_longest=by_longest))
    assert_equal(by_hand(batches_of_step, by_longest=by_longest), list(module.state_dict().values()), 1e-12)


@pytest.mark.parametrize("options", [{}, {"strategy": "ddp", "devices": 2}])
def test_workers_of_loaders_read_the_batches_of_one_process(options: dict[str, Any]) -> None:
    module = Words()
    trainer(max_epochs=EPOCHS, **options).fit(module, loader(num_workers=1, persistent_workers=True))
    assert_equal(by_hand(options.get("devices", 1)), list(module.state_dict().values()), 1e-12)


def test_micro_batches_after_an_error_of_memory_train_the_same_weights() -> None:
    module = Words(most_samples=5)
    trainer(max_epochs=EPOCHS, callbacks=[OOMRecovery()], accumulate_grad_batches=2).fit(module, loader())
    assert_equal(by_hand(2), list(module.state_dict().values()), 1e-12)


class Kills(L.Callback):
    """Saves a checkpoint after a batch, and kills the last process after the next one."""

    def __init__(self, folder: Path, epoch: int, batch: int) -> None:
        self.folder = folder
        self.epoch = epoch
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == self.epoch and batch_idx == self.batch:
            trainer.save_checkpoint(self.folder / "saved.ckpt")
        elif trainer.current_epoch == self.epoch and batch_idx > self.batch:
            if trainer.world_size == 1:
                raise KeyboardInterrupt
            if trainer.global_rank == trainer.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("before", "after", "epoch"),
    [
        ("ddp 2", "ddp 2", 1),
        ("ddp 2", "ddp 3", 0),
        ("ddp 2", "alone", 1),
        ("alone", "ddp 2", 1),
    ],
)
def test_killed_runs_continue(before: str, after: str, epoch: int, tmp_path: Path) -> None:
    """Within an epoch, also with another number of processes: the weights are those of an uninterrupted run."""
    batches_of_step, options = RUNS[before]
    with pytest.raises((WorkerError, KeyboardInterrupt, SystemExit)):
        trainer(max_epochs=EPOCHS, callbacks=[Kills(tmp_path, epoch, 3)], **options).fit(Words(), loader())
    module = Words()
    trainer(max_epochs=EPOCHS, **RUNS[after][1]).fit(module, loader(), ckpt_path=tmp_path / "saved.ckpt")
    assert_equal(by_hand(batches_of_step), list(module.state_dict().values()), 1e-12)


def test_evaluations_read_each_sample_once() -> None:
    class Counting(Words):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("count", float(len(batch)), reduce_fx="sum")

    run = trainer(strategy="ddp", devices=2)
    sampler = TokenBatchSampler(LENGTHS, 240, shuffle=False)
    (metrics,) = run.validate(Counting(), DataLoader(DATA, batch_sampler=sampler, collate_fn=padded), verbose=False)
    assert metrics["count"] == len(DATA)
