"""Random programs whose processes read sources of unequal length, against one loop in one process.

A script for torchrun: `uneven_programs.py FOLDER STRATEGY FIRST_SEED NUMBER PROCESSES`. Each program draws the number
of batches of each process in each epoch, what the source says of its length, accumulation, limits and intervals. It
trains, and resumes from one of its checkpoints. All processes draw the same program. The reference knows no process
and no loader: it adds up the gradients of all samples of a step.
"""

import copy
import random
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from equipoise import Trainer
from tests.support.equality import assert_equal
from tests.support.quiet import QUIET

TOLERANCE = 1e-12
FEATURES = 3
LARGEST_SIZE = 3


@dataclass
class Program:
    """Description of a program.

    Attributes:
        sizes: Number of samples of each batch, by epoch and process.
        kind: The source: "stream", "promising stream", "loader" or "samples".
        promise: What sources that promise a length say, by process.
    """

    sizes: list[list[list[int]]]
    kind: str
    promise: list[int]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def epochs(self) -> int:
        return len(self.sizes)

    def steps(self, epoch: int) -> list[list[int | None]]:
        """Return for each step of an epoch the number of samples of each process; None without a batch."""
        of_processes = self.sizes[epoch]
        if self.kind in ("promising stream", "loader"):
            # Data beyond the promise are not read.
            of_processes = [sizes[:promise] for sizes, promise in zip(of_processes, self.promise, strict=True)]
        count = max(map(len, of_processes))
        limit = self.options.get("limit_train_batches", count)
        return [
            [sizes[step] if step < len(sizes) else None for sizes in of_processes] for step in range(min(count, limit))
        ]


def draw_program(numbers: random.Random, processes: int) -> Program:
    """Draw a program, the same in all processes."""
    kind = numbers.choice(["stream", "promising stream", "loader", "samples"])
    epochs = numbers.randint(1, 3)
    varies = kind != "samples"
    sizes = []
    for epoch in range(epochs):
        of_processes = [_draw_sizes(numbers) for _ in range(processes)]
        if not any(of_processes):
            of_processes[numbers.randrange(processes)] = [1]
        if epoch and not varies:
            of_processes = sizes[0]
        sizes.append(of_processes)
    promise = [numbers.randint(1, 8) for _ in range(processes)]
    longest = max(map(len, sizes[0])) if kind == "samples" else max(promise)
    options: dict[str, Any] = {"accumulate_grad_batches": numbers.randint(1, 4)}
    if numbers.random() < 0.3:
        options["limit_train_batches"] = numbers.randint(1, 8)
        longest = min(longest, options["limit_train_batches"])
    if numbers.random() < 0.5:
        options["val_check_interval"] = numbers.randint(1, longest)
        options["check_val_every_n_epoch"] = numbers.choice([1, None])
    return Program(sizes, kind, promise, options)


def _draw_sizes(numbers: random.Random) -> list[int]:
    """Draw the number of samples of each batch of a process; none in some."""
    return [numbers.randint(1, LARGEST_SIZE) for _ in range(numbers.randint(0, 7))]


# Samples


def sample(epoch: int, rank: int, step: int, number: int) -> Tensor:
    """Return one sample, with its own values."""
    generator = torch.Generator().manual_seed(((epoch * 10 + rank) * 10 + step) * 10 + number)
    return torch.rand(FEATURES, generator=generator, dtype=torch.float64)


def batches_of(program: Program, epoch: int, rank: int) -> Iterator[Tensor]:
    """Yield the batches of a process."""
    for step, size in enumerate(program.sizes[epoch][rank]):
        yield torch.stack([sample(epoch, rank, step, number) for number in range(size)])


class Epochs:
    """Counts the passes over a source, which gives others in each."""

    def __init__(self, program: Program, rank: int, epoch: int = 0) -> None:
        self.program = program
        self.rank = rank
        self.epoch = epoch

    def batches(self) -> Iterator[Tensor]:
        # With the first batch: a loader is opened once to see that it can be.
        epoch = self.epoch
        self.epoch += 1
        yield from batches_of(self.program, epoch, self.rank)


class Stream(IterableDataset[Tensor]):
    def __init__(self, epochs: Epochs) -> None:
        self.epochs = epochs

    def __iter__(self) -> Iterator[Tensor]:
        return self.epochs.batches()


class PromisingStream(Stream):
    def __len__(self) -> int:
        return self.epochs.program.promise[self.epochs.rank]


class Loader:
    """A loader that is no DataLoader, promises a length, and fails if it is asked for a batch beyond it."""

    def __init__(self, epochs: Epochs) -> None:
        self.epochs = epochs

    def __len__(self) -> int:
        return self.epochs.program.promise[self.epochs.rank]

    def __iter__(self) -> Iterator[Tensor]:
        for read, batch in enumerate(self.epochs.batches()):
            assert read < len(self)
            yield batch


class Samples(Dataset[Tensor]):
    """A data set of batches, other ones in each process, and as many in each epoch."""

    def __init__(self, program: Program, rank: int) -> None:
        self.batches = list(batches_of(program, 0, rank))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index]


def source_of(program: Program, rank: int, epoch: int) -> Any:
    """Return the source of a process, whose next pass is that of an epoch."""
    epochs = Epochs(program, rank, epoch)
    if program.kind == "stream":
        return DataLoader(Stream(epochs), batch_size=None)
    if program.kind == "promising stream":
        return DataLoader(PromisingStream(epochs), batch_size=None)
    if program.kind == "loader":
        return Loader(epochs)
    return DataLoader(Samples(program, rank), batch_size=None)


# Training


class Network(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Network()
        self.validated: list[int] = []
        self.rates: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", self.net(batch).square().mean(), sync_dist=True, batch_size=len(batch))

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.global_step)

    def on_train_epoch_start(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def reference(program: Program) -> tuple[Network, int, list[int]]:
    """Return the network that one loop over all samples trains, its steps, and the steps after each epoch."""
    torch.manual_seed(1)
    net = Network().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    window = program.options["accumulate_grad_batches"]
    count = 0
    after_epochs = []
    for epoch in range(program.epochs):
        source_epoch = 0 if program.kind == "samples" else epoch
        steps = program.steps(epoch)
        for begin in range(0, len(steps), window):
            samples = []
            for step in range(begin, min(begin + window, len(steps))):
                for rank, size in enumerate(steps[step]):
                    samples += [sample(source_epoch, rank, step, number) for number in range(size or 0)]
            optimizer.zero_grad()
            net(torch.stack(samples)).square().mean().backward()
            optimizer.step()
            count += 1
        scheduler.step()
        after_epochs.append(count)
    return net, count, after_epochs


def fit(
    program: Program, strategy: str, saves: ModelCheckpoint, checkpoint: Path | None = None
) -> tuple[Trainer, Module, dict[str, Tensor]]:
    """Run the program, or the rest of it behind a checkpoint."""
    trainer = Trainer(
        strategy=strategy,
        devices=len(program.promise),
        accelerator="cpu",
        precision="64-true",
        max_epochs=program.epochs,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[saves],
        **{**QUIET, "enable_checkpointing": True, **program.options},
    )
    module = Module()
    epoch = 0
    if checkpoint is not None:
        epoch = torch.load(checkpoint, weights_only=False)["epoch"]
    validation = [torch.rand(2, FEATURES, dtype=torch.float64) for _ in range(1 + trainer.global_rank)]
    validation_loader = DataLoader(validation, batch_size=None)
    trainer.fit(module, source_of(program, trainer.global_rank, epoch), validation_loader, ckpt_path=checkpoint)
    return trainer, module, {name: value.detach().clone() for name, value in module.net.state_dict().items()}


def check(program: Program, strategy: str, folder: Path, numbers: random.Random) -> None:
    """Compare a program with the reference, and so the rest of it behind one of its checkpoints."""
    expected, count, after_epochs = reference(program)
    step = numbers.randint(1, count)
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=step, save_top_k=-1)
    trainer, module, weights = fit(program, strategy, saves)
    assert trainer.global_step == count, (trainer.global_step, count)
    assert_equal(dict(expected.state_dict()), weights, TOLERANCE)
    rates = [0.3 * 0.7**epoch for epoch in range(program.epochs)]
    assert all(abs(rate - right) < TOLERANCE for rate, right in zip(module.rates, rates, strict=True)), module.rates
    if "val_check_interval" not in program.options:
        assert module.validated == after_epochs, (module.validated, after_epochs)

    # The rest behind a checkpoint.
    resumed, again, weights = fit(program, strategy, copy.deepcopy(saves), folder / f"step={step}.ckpt")
    assert resumed.global_step == count, (step, resumed.global_step, count)
    assert_equal(dict(expected.state_dict()), weights, TOLERANCE)
    done = len(again.validated)
    assert again.validated == module.validated[len(module.validated) - done :], (again.validated, module.validated)


def main(folder: str, strategy: str, first: int, number: int, world: int) -> None:
    """Run programs of consecutive seeds."""
    warnings.filterwarnings("ignore")
    for seed in range(first, first + number):
        numbers = random.Random(seed)
        program = draw_program(numbers, world)
        place = Path(folder) / str(seed)
        try:
            check(program, strategy, place, numbers)
        except BaseException:
            print(f"seed {seed}: {program}", flush=True)
            raise
        shutil.rmtree(place, ignore_errors=True)
        place.with_suffix(".done").touch()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
