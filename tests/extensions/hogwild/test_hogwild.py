"""Processes that step shared parameters: what they share, where they meet, and how they end."""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import HogwildStrategy, OOMRecovery, Trainer, WorkerError
from tests.support.equality import assert_equal
from tests.support.failures import Mistake, raises
from tests.support.trainer_runs import refuses
from tests.support.trainer_runs import trainer as quiet

pytestmark = pytest.mark.slow

SAMPLES = 96


def loader(**options: Any) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(3)
    features = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=draw)
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), **{"batch_size": 4, **options})


class Linear(L.LightningModule):
    """Learns a sum; notes how it was run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1).double()
        self.register_buffer("steps", torch.zeros(()))
        self.notes: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


def trainer(state: Any = "own", **options: Any) -> Trainer:
    strategy = HogwildStrategy(processes=2, optimizer_state=state)
    return quiet(strategy=strategy, **{"max_epochs": 2, "num_sanity_val_steps": 0, **options})


def fit(module: L.LightningModule, data: Any = None, val: Any = None, **options: Any) -> Trainer:
    run = trainer(**options)
    run.fit(module, data or loader(), val or loader())
    return run


class Remembers(Linear):
    """Notes the states of the optimisers of all processes at the end."""

    def on_train_end(self) -> None:
        momentum = self.trainer.optimizers[0].state[self.net.weight]["momentum_buffer"]
        self.notes = self.trainer.strategy.processes.gather_objects(momentum.tolist())


@pytest.mark.parametrize("state", ["own", "shared"])
def test_processes_step_shared_parameters(state: Any) -> None:
    torch.manual_seed(1)
    module = Remembers()
    before = module.net.weight.detach().clone()
    run = fit(module, loader(shuffle=True), state=state, max_epochs=6)
    # 1. The caller's module has learned, in memory of its own.
    assert float(run.callback_metrics["val_loss"]) < 0.05
    assert not torch.equal(module.net.weight, before)
    assert module.net.weight.untyped_storage().nbytes() == module.net.weight.nbytes
    # 2. Each process counts its own steps: half of the samples, in batches of 4.
    assert run.global_step == 6 * SAMPLES // 2 // 4
    assert int(module.steps) == run.global_step
    # 3. Their optimisers have one state, or one each.
    assert (module.notes[0] == module.notes[1]) == (state == "shared")


class FirstOnly(Linear):
    """Only rank 0 steps."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05 * (self.global_rank == 0))


def test_a_smaller_batch_counts_in_full() -> None:
    """Each process takes a step of its own, so no other batch is there to weigh it by."""
    draw = torch.Generator().manual_seed(3)
    features = torch.randn(14, 4, dtype=torch.float64, generator=draw)
    samples = TensorDataset(features, features.sum(1, keepdim=True))
    torch.manual_seed(1)
    module, expected = FirstOnly(), Linear()
    expected.load_state_dict(module.state_dict())
    fit(module, DataLoader(samples, batch_size=4), max_epochs=1, limit_val_batches=0)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.05)
    for batch in (features[::2][:4], features[::2][4:]):
        optimizer.zero_grad()
        nn.functional.mse_loss(expected.net(batch), batch.sum(1, keepdim=True)).backward()
        optimizer.step()
    assert_equal(expected.net, module.net, 1e-12)


class Meeting(Linear):
    """Only rank 1 steps; rank 0 sees its changes, and all agree in every evaluation."""

    def configure_optimizers(self) -> Any:
        rate = 0.05 * self.global_rank
        return torch.optim.SGD(self.parameters(), lr=rate)

    def on_validation_start(self) -> None:
        self.note()

    def on_validation_end(self) -> None:
        self.note()

    def note(self) -> None:
        weights = self.trainer.strategy.processes.gather_objects(self.net.weight.detach().clone())
        self.notes.append([weight.tolist() for weight in weights])


def test_all_see_the_changes_of_one_and_stand_still_in_evaluations() -> None:
    torch.manual_seed(1)
    module = Meeting()
    before = module.net.weight.tolist()
    fit(module, val_check_interval=3)
    assert len(module.notes) > 6
    for start, end in zip(module.notes[::2], module.notes[1::2], strict=True):
        assert start[0] == start[1] == end[0] == end[1]
    values = [start[0] for start in module.notes[::2]]
    assert before not in values
    assert all(one != other for one, other in pairwise(values))


class Unequal(Linear):
    """Rank 1 is far ahead of rank 0 when it comes to a checkpoint."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 0:
            for _ in range(300):
                self.net(batch[0])
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 7:
            folder = Path(self.trainer.default_root_dir)
            self.trainer.save_checkpoint(folder / "x.ckpt")
            weights = self.trainer.strategy.processes.gather_objects(self.net.weight.detach().clone())
            self.notes += [weights, int(self.steps)]


def test_a_checkpoint_holds_weights_that_nobody_changes(tmp_path: Path) -> None:
    module = Unequal()
    fit(module, default_root_dir=tmp_path, max_epochs=1)
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert int(saved["state_dict"]["steps"]) == 8
    # After the file was written nobody had continued yet: all left the save together.
    assert saved["state_dict"]["net.weight"].shape == (1, 4)
    # It continues under one process, from its own position, and under two.
    run = trainer()
    run.fit(Linear(), loader(), loader(), ckpt_path=tmp_path / "x.ckpt")
    assert run.global_step == 2 * SAMPLES // 2 // 4


class Failing(Linear):
    """One process does something else in one step."""

    def __init__(self, failure: Callable[[Any], None]) -> None:
        super().__init__()
        self.failure = failure

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 5:
            self.failure(batch)
        return super().training_step(batch, batch_idx)


def test_a_failed_process_ends_the_run_with_its_traceback() -> None:
    with pytest.raises(Mistake, match="on purpose") as caught:
        fit(Failing(lambda batch: raises()), max_epochs=1000)
    assert "Raised in rank 1 of 2" in " ".join(caught.value.__notes__)
    assert "in training_step" in str(caught.value.__cause__)


def test_a_process_that_dies_ends_the_run() -> None:
    with pytest.raises(WorkerError, match="rank 1"):
        fit(Failing(lambda batch: os._exit(3)), max_epochs=1000)


def run_out_of_memory(batch: Any) -> None:
    if len(batch[0]) > 2:
        raise torch.OutOfMemoryError("out of memory")


@pytest.mark.filterwarnings("ignore:Batch 5 of 4 samples ran out of memory")
def test_a_step_that_ran_out_of_memory_is_repeated_by_its_process_alone() -> None:
    torch.manual_seed(1)
    run = fit(Failing(run_out_of_memory), loader(shuffle=True), max_epochs=6, callbacks=[OOMRecovery()])
    assert float(run.callback_metrics["val_loss"]) < 0.05


def test_a_process_without_a_batch_does_not_step() -> None:
    """Five samples for two processes, one each: in the last step there is none for rank 1."""
    features = torch.ones(5, 4, dtype=torch.float64)
    data = DataLoader(TensorDataset(features, features[:, :1]), batch_size=1)
    module = Linear()
    assert fit(module, data, data, max_epochs=1).global_step == 3
    assert torch.isfinite(module.net.weight).all()


class Scheduled(Linear):
    """Counts the steps of a scheduler and of its optimiser, in each process."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        optimizer.register_step_post_hook(lambda *_: self.notes.append("step"))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_end(self) -> None:
        counts = (len(self.notes), self.lr_schedulers().last_epoch, self.trainer.global_step)
        self.notes = self.trainer.strategy.processes.gather_objects(counts)


def test_max_steps_and_schedulers_count_the_steps_of_one_process() -> None:
    """Twelve batches for each process in an epoch, of which the run takes ten."""
    module = Scheduled()
    run = fit(module, max_steps=10, max_epochs=-1)
    assert run.estimated_stepping_batches == 10
    assert module.notes == [(10, 10, 10), (10, 10, 10)]


class Seeds(Linear):
    def on_train_start(self) -> None:
        self.notes = self.trainer.strategy.processes.gather_objects(torch.rand(2).tolist())


def test_processes_draw_other_random_numbers() -> None:
    module = Seeds()
    fit(module, max_epochs=1)
    assert module.notes[0] != module.notes[1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: HogwildStrategy(processes=0), "processes must be"),
        (lambda: HogwildStrategy(optimizer_state="none"), "optimizer_state must be"),  # type: ignore[arg-type]
        (lambda: trainer(num_nodes=2), "one machine"),
        (lambda: fit(Linear(), state="shared", precision="16-mixed"), "cannot meet to share a state"),
        (
            lambda: fit(Linear(), callbacks=[EMAWeightAveraging()]),
            "several processes would do so with the same weights",
        ),
        (lambda: trainer(devices=3), "Leave one of the two out"),
        (lambda: HogwildStrategy().connect([torch.device("cuda:0")]), "CPUs"),
    ],
    ids=["processes", "state", "nodes", "precision", "averages", "devices", "gpu"],
)
def test_what_processes_cannot_share_is_refused(make: Any, words: str) -> None:
    refuses(make, words)
