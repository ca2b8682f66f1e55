"""Programs that torchrun runs on each machine: loops by hand and through the trainer, and fits that are disturbed.

torchrun ... programs.py TASK FOLDER STRATEGIES      the first machine writes FOLDER/result.json
"""

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from equipoise import DDPStrategy, FSDPStrategy, PipelineStrategy, Trainer

RANK = int(os.environ["RANK"])
WIDTH, BLOCKS, BATCH, FEW, MICRO_BATCHES = 256, 8, 256, 32, 8
WARM_UP, TIMED, ROUNDS, COMPARED, DISTURBED = 3, 12, 3, 5, 40
STEPS = WARM_UP + TIMED + 1
SECONDS = 150.0  # for which processes wait for one another
SENT = Path("/sys/class/net/net0/statistics/tx_bytes")


class Block(nn.Module):
    """Two layers and a shortcut around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


def network() -> nn.Sequential:
    """Return 4.2 million parameters, the same ones in each process."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(BLOCKS)])


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)


def data(steps: int, samples: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Return the samples of some steps."""
    drawn = torch.rand(2, steps * samples, WIDTH, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return TensorDataset(*drawn)


class Clock:
    """Seconds and sent bytes of a step, between two steps."""

    def __init__(self) -> None:
        self.step = self.sent = 0
        self.seconds = self.start = 0.0

    def tick(self) -> None:
        if self.step == WARM_UP:
            self.start, self.sent = time.perf_counter(), int(SENT.read_text())
        if self.step == WARM_UP + TIMED:
            self.seconds = (time.perf_counter() - self.start) / TIMED
            self.sent = (int(SENT.read_text()) - self.sent) // TIMED
        self.step += 1


# By hand


def loop(module: nn.Module, dataset: TensorDataset, samples: int, step: Callable[[Any], None], clock: Clock) -> None:
    optimizer = optimizer_of(module)
    for batch in DataLoader(dataset, batch_size=samples):
        clock.tick()
        optimizer.zero_grad()
        step(batch)
        optimizer.step()


def by_hand(strategy: str, clock: Clock, *, is_alone: bool) -> None:
    """Train by the loop of torch's tutorials; alone, on one device, which for a pipeline has all samples."""
    samples = 2 * BATCH if strategy == "pipeline" else BATCH
    module: Any = network()

    def step(batch: Any) -> None:
        loss_of(module(batch[0]), batch[1]).backward()

    if is_alone:
        pass
    elif strategy == "fsdp":
        for unit in (*module, module):
            fully_shard(unit)
    elif strategy == "pipeline":
        half = BLOCKS // 2
        module = module[RANK * half : (RANK + 1) * half]
        schedule = Schedule1F1B(PipelineStage(module, RANK, 2, torch.device("cpu")), MICRO_BATCHES, loss_fn=loss_of)
        loop(module, data(STEPS, samples), samples, lambda batch: _step(schedule, batch), clock)
        return
    else:
        size = 2 if strategy == "ddp-2MiB" else 25
        module = DistributedDataParallel(module, bucket_cap_mb=size, gradient_as_bucket_view=True)
    loop(module, data(STEPS, samples), samples, step, clock)


def _step(schedule: Schedule1F1B, batch: Any) -> None:
    if RANK == 0:
        schedule.step(batch[0])
    else:
        schedule.step(target=batch[1])


def exchange(strategy: str, clock: Clock) -> None:
    """Exchange what a step does, and computes nothing."""
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in network()]
    whole, half = torch.zeros(sum(sizes)), torch.zeros(sum(sizes) // 2)
    for _ in range(STEPS):
        clock.tick()
        if strategy.startswith("ddp"):
            dist.all_reduce(whole)
        for size in sizes if strategy == "fsdp" else ():
            for _ in ("forward", "backward"):
                dist.all_gather_into_tensor(whole[:size], half[: size // 2])
            dist.reduce_scatter_tensor(half[: size // 2], whole[:size])
        if strategy == "pipeline":
            values = whole[: 2 * BATCH * WIDTH]
            for direction in (0, 1):
                if direction == RANK:
                    dist.send(values, 1 - RANK)
                else:
                    dist.recv(values, 1 - RANK)


# Through the trainer


class Module(LightningModule):
    """The network, whose steps a clock notes.

    Args:
        clock: The clock.
    """

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self.net, self.clock = network(), clock

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.clock.tick()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: DDPStrategy(timeout=SECONDS),
    "ddp-2MiB": lambda: DDPStrategy(bucket_megabytes=2, timeout=SECONDS),
    "fsdp": lambda: FSDPStrategy(timeout=SECONDS),
    "pipeline": lambda: PipelineStrategy(engine="processes", micro_batches=MICRO_BATCHES, timeout=SECONDS),
}


def fit(strategy: str, module: Module, dataset: TensorDataset, samples: int = BATCH, **options: Any) -> Trainer:
    """Train for an epoch, with as many samples of a step for each machine; a pipeline has both shares in a batch."""
    path = options.pop("ckpt_path", None)
    trainer = Trainer(
        strategy=STRATEGIES[strategy](),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    batch_size = 2 * samples if strategy == "pipeline" else samples
    trainer.fit(module, DataLoader(dataset, batch_size=batch_size), ckpt_path=path)
    return trainer


# Tasks


def speed(strategies: list[str], folder: Path) -> Any:
    """Time each strategy by hand and through the trainer, and its computation and its exchange alone."""
    # Other programs of this machine must not take the processors of the two.
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    turns = []
    for strategy, way in ROUNDS * list(product(strategies, ("alone", "exchange", "by hand", "trainer"))):
        clock = Clock()
        dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
        if way in ("alone", "by hand"):
            by_hand(strategy, clock, is_alone=way == "alone")
        if way == "exchange":
            exchange(strategy, clock)
        dist.barrier()
        dist.destroy_process_group()
        if way == "trainer":
            fit(strategy, Module(clock), data(STEPS, 2 * BATCH), enable_checkpointing=False)
        turns.append([strategy, way, clock.seconds, clock.sent])
    return turns


def same(strategies: list[str], folder: Path) -> Any:
    """Train in float64, and return the largest difference from the weights of one device under each strategy."""
    dataset = data(COMPARED, 2 * BATCH, torch.float64)
    alone = network().double()
    loop(alone, dataset, 2 * BATCH, lambda batch: loss_of(alone(batch[0]), batch[1]).backward(), Clock())
    differences = {}
    for strategy in strategies:
        module = Module(Clock())
        fit(strategy, module, dataset, enable_checkpointing=False, precision="64-true")
        pairs = zip(alone.parameters(), module.net.parameters(), strict=True)
        differences[strategy] = max(float((one.detach() - other.detach()).abs().max()) for one, other in pairs)
    return differences


class Progress:
    """Notes each step in a file that the faults wait for.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def tick(self) -> None:
        if RANK == 0:
            with self.path.open("a") as file:
                file.write(f"{time.time()}\n")


def disturbed(strategies: list[str], folder: Path) -> Any:
    """Train with checkpoints, from the last one if there is one, and return the weights."""
    module = Module(Progress(folder / "steps.txt"))
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=8, save_last=True)
    options: dict[str, Any] = {"precision": "64-true", "callbacks": [checkpoints], "ckpt_path": "last"}
    fit(strategies[0], module, data(DISTURBED, 2 * FEW, torch.float64), FEW, **options)
    return [float(parameter.detach().double().sum()) for parameter in module.net.parameters()]


def main(task: str, folder: Path, strategies: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    result = {"speed": speed, "same": same, "disturbed": disturbed}[task](strategies, folder)
    if RANK == 0:
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
