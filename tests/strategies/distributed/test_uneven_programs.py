"""Random programs whose processes read sources of unequal length train as one loop over all samples, and resume.

Each program draws the number of batches of each process in each epoch, what the source says of its length,
accumulation, limits and intervals. The reference knows no process and no loader: it adds up the gradients of all
samples of a step.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.support.equality import assert_equal
from tests.support.process_groups import in_group
from tests.support.trainer_runs import trainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-12
FEATURES = 3


@dataclass
class Program:
    """Description of a program.

    Attributes:
        kind: The source: "stream", "promising stream", "loader" or "samples".
        sizes: Number of samples of each batch, by epoch and process.
        promise: What sources that promise a length say, by process.
        options: Those of the trainer.
    """

    kind: str
    sizes: list[list[list[int]]]
    promise: list[int]
    options: dict[str, Any]

    def batches(self, epoch: int, rank: int) -> list[Tensor]:
        """The batches that a process has, with values of their own."""
        draw = torch.Generator().manual_seed(100 * epoch + rank)
        return [torch.rand(size, FEATURES, generator=draw, dtype=torch.float64) for size in self.sizes[epoch][rank]]

    def steps(self, epoch: int) -> list[list[Tensor]]:
        """The batches of each step of an epoch."""
        of_processes = [self.batches(epoch, rank) for rank in range(len(self.promise))]
        if self.kind in ("promising stream", "loader"):
            # Data beyond the promise are not read.
            of_processes = [batches[:count] for batches, count in zip(of_processes, self.promise, strict=True)]
        count = min(max(map(len, of_processes)), self.options.get("limit_train_batches", 99))
        return [[batches[step] for batches in of_processes if step < len(batches)] for step in range(count)]


def draw_program(numbers: random.Random, processes: int) -> Program:
    """Draw a program, the same in all processes."""
    kind = numbers.choice(["stream", "promising stream", "loader", "samples"])
    sizes = []
    for _ in range(numbers.randint(1, 3)):
        of_processes = [[numbers.randint(1, 3) for _ in range(numbers.randint(0, 7))] for _ in range(processes)]
        if not any(of_processes):
            of_processes[numbers.randrange(processes)] = [1]
        # A data set of samples has as many in each epoch.
        sizes.append(sizes[0] if sizes and kind == "samples" else of_processes)
    promise = [numbers.randint(1, 8) for _ in range(processes)]
    longest = max(map(len, sizes[0])) if kind == "samples" else max(promise)
    options: dict[str, Any] = {"accumulate_grad_batches": numbers.randint(1, 4)}
    if numbers.random() < 0.3:
        options["limit_train_batches"] = numbers.randint(1, 8)
        longest = min(longest, options["limit_train_batches"])
    if numbers.random() < 0.5:
        options["val_check_interval"] = numbers.randint(1, longest)
        options["check_val_every_n_epoch"] = numbers.choice([1, None])
    return Program(kind, sizes, promise, options)


class Epochs:
    """A loader that is no DataLoader: other batches in each pass, and a length that may be another."""

    def __init__(self, program: Program, rank: int, epoch: int) -> None:
        self.program, self.rank, self.epoch = program, rank, epoch

    def __len__(self) -> int:
        return self.program.promise[self.rank]

    def __iter__(self) -> Iterator[Tensor]:
        # With the first batch: a loader is opened once to see that it can be.
        epoch = self.epoch
        self.epoch += 1
        for read, batch in enumerate(self.program.batches(epoch, self.rank)):
            assert self.program.kind != "loader" or read < len(self)
            yield batch


class Stream(IterableDataset[Tensor]):
    def __init__(self, epochs: Epochs) -> None:
        self.epochs = epochs

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.epochs)


class PromisingStream(Stream):
    def __len__(self) -> int:
        return len(self.epochs)


def source_of(program: Program, rank: int, epoch: int) -> Any:
    """Return the source of a process, whose next pass is that of an epoch."""
    epochs = Epochs(program, rank, epoch)
    if program.kind == "loader":
        return epochs
    sources = {"stream": Stream, "promising stream": PromisingStream}
    source: Any = sources[program.kind](epochs) if program.kind in sources else program.batches(0, rank)
    return DataLoader(source, batch_size=None)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))
        self.validated: list[int] = []
        self.rates: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", self.loss(batch), sync_dist=True, batch_size=len(batch))

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.global_step)

    def on_train_epoch_start(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def reference(program: Program) -> tuple[Module, list[int]]:
    """Return the module that one loop over all samples trains, and the number of steps after each epoch."""
    module = Module().double()
    (optimizer,), (scheduler,) = module.configure_optimizers()
    window, count, after_epochs = program.options["accumulate_grad_batches"], 0, []
    for epoch in range(len(program.sizes)):
        steps = program.steps(0 if program.kind == "samples" else epoch)
        for begin in range(0, len(steps), window):
            optimizer.zero_grad()
            module.loss(torch.cat([batch for step in steps[begin : begin + window] for batch in step])).backward()
            optimizer.step()
            count += 1
        scheduler.step()
        after_epochs.append(count)
    return module, after_epochs


def fit(program: Program, strategy: str, folder: Path, every: int, checkpoint: Path | None = None) -> Module:
    """Run the program, or the rest of it behind a checkpoint."""
    run = trainer(
        strategy=strategy,
        devices=len(program.promise),
        precision="64-true",
        max_epochs=len(program.sizes),
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)],
        enable_checkpointing=True,
        **program.options,
    )
    module, rank = Module(), run.global_rank
    epoch = 0 if checkpoint is None else torch.load(checkpoint, weights_only=False)["epoch"]
    validation = DataLoader([torch.rand(2, FEATURES, dtype=torch.float64) for _ in range(1 + rank)], batch_size=None)
    run.fit(module, source_of(program, rank, epoch), validation, ckpt_path=checkpoint)
    return module


def check(program: Program, strategy: str, folder: Path, numbers: random.Random) -> None:
    """Compare a program with the reference, and so the rest of it behind one of its checkpoints."""
    expected, after_epochs = reference(program)
    step = numbers.randint(1, after_epochs[-1])
    module = fit(program, strategy, folder, step)
    resumed = fit(program, strategy, folder, step, folder / f"step={step}.ckpt")
    for each in (module, resumed):
        assert each.trainer.global_step == after_epochs[-1]
        assert_equal(expected, each, TOLERANCE)
    assert_equal([0.3 * 0.7**epoch for epoch in range(len(program.sizes))], module.rates, TOLERANCE)
    if "val_check_interval" not in program.options:
        assert module.validated == after_epochs
    assert module.validated[len(module.validated) - len(resumed.validated) :] == resumed.validated


def run_programs(rank: int, strategy: str, seeds: range, processes: int, folder: Path) -> None:
    for seed in seeds:
        numbers = random.Random(seed)
        program = draw_program(numbers, processes)
        try:
            check(program, strategy, folder / str(seed), numbers)
        except BaseException as error:
            error.add_note(f"This was in the program of seed {seed}: {program}")
            raise


@pytest.mark.parametrize(
    ("strategy", "processes", "seeds"),
    # By that many, nearly all pairs of what is drawn have occurred: 204 of 206 in 60 programs, and 190 in 30.
    [("ddp", 2, range(60)), ("ddp", 3, range(100, 130)), ("fsdp", 2, range(200, 230))],
    ids=["ddp-2", "ddp-3", "fsdp-2"],
)
def test_random_programs_with_uneven_sources_train_as_one_process_and_resume(
    strategy: str, processes: int, seeds: range, tmp_path: Path
) -> None:
    in_group(run_programs, strategy, seeds, processes, tmp_path, processes=processes)
