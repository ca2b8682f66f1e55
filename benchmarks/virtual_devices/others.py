"""Do other trainers end with the same weights on another number of processes, with their own options for it?"""

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kills.processes import attempt
from benchmarks.virtual_devices.main import differences
from benchmarks.virtual_devices.networks import NETWORKS
from equipoise import Trainer, VirtualDevicesStrategy

SEED = 7
SAMPLES = 240
# Of a whole step, whatever the number of processes.
BATCH_SIZE = 24
# Seconds for each run.
LIMIT = 200.0


class Program(NamedTuple):
    """A training of one epoch.

    Attributes:
        network: The name of the network.
        shuffle: Whether samples are shuffled.
        window: The number of batches of an accumulation window.
    """

    network: str
    shuffle: bool
    window: int


PROGRAMS = {
    "linear layers, not shuffled": Program("rows", shuffle=False, window=1),
    "perceptron": Program("perceptron", shuffle=True, window=1),
    "perceptron, windows of 3": Program("perceptron", shuffle=True, window=3),
    "attention": Program("attention", shuffle=True, window=1),
    "attention, windows of 3": Program("attention", shuffle=True, window=3),
}


class Task(L.LightningModule):
    """Trains a network.

    Args:
        network: The network.
        loss: Function of outputs and targets. Default: their squared difference.
    """

    def __init__(self, network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss) -> None:
        super().__init__()
        self.network = network
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss on a batch or a part of it."""
        features, targets = batch
        return self.loss(self.network(features), targets)

    def configure_optimizers(self) -> Any:
        """Return the optimiser."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class SameOrder(Task):
    """Trains on samples whose order does not depend on the number of processes, with a sampler of the user's.

    Args:
        network: The network.
        program: The program.
    """

    def __init__(self, network: nn.Module, program: Program) -> None:
        super().__init__(network)
        self.program = program

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the samples of the process."""
        processes, rank = self.trainer.world_size, self.trainer.global_rank
        data = _data()
        sampler = DistributedSampler(data, processes, rank, shuffle=self.program.shuffle, seed=SEED)
        return DataLoader(data, batch_size=BATCH_SIZE // processes, sampler=sampler)


def _data() -> TensorDataset:
    features = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(SEED))
    return TensorDataset(features, features.sin().sum(1, keepdim=True))


def _loader(program: Program, batch_size: int) -> DataLoader[Any]:
    return DataLoader(_data(), batch_size=batch_size, shuffle=program.shuffle)


# The trainers. Each trains on a number of processes, and writes the weights into a file.


def equipoise(program: Program, processes: int, path: Path) -> None:
    """Train with virtual devices."""
    strategy = VirtualDevicesStrategy(count=4)
    _fit(Trainer, program, processes, path, _loader(program, BATCH_SIZE), strategy=strategy)


def lightning(program: Program, processes: int, path: Path) -> None:
    """Train with Lightning's Trainer, under DDP in several processes, each with its part of the batch size."""
    loader = _loader(program, BATCH_SIZE // processes)
    _fit(L.Trainer, program, processes, path, loader, strategy=_ddp(processes))


def lightning_in_same_order(program: Program, processes: int, path: Path) -> None:
    """Train with Lightning's Trainer as before, with a sampler that orders samples alike."""
    _fit(L.Trainer, program, processes, path, None, strategy=_ddp(processes), use_distributed_sampler=False)


def _ddp(processes: int) -> Any:
    if processes == 1:
        return "auto"
    return DDPStrategy(process_group_backend="gloo", start_method="fork")


def _fit(kind: Any, program: Program, processes: int, path: Path, loader: Any, **options: Any) -> None:
    L.seed_everything(SEED, workers=True, verbose=False)
    network = NETWORKS[program.network]()
    trainer = kind(
        accelerator="cpu",
        devices=processes,
        deterministic=True,
        max_epochs=1,
        accumulate_grad_batches=program.window,
        default_root_dir=path.parent,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(SameOrder(network, program) if loader is None else Task(network), loader)
    torch.save(trainer.lightning_module.network.state_dict(), path)


def accelerate(program: Program, processes: int, path: Path) -> None:
    """Train with Accelerate, which divides the batches, in processes of its launcher for CPUs."""
    from accelerate import debug_launcher

    train = partial(_train_with_accelerate, program, path)
    if processes == 1:
        train()
    else:
        debug_launcher(train, num_processes=processes)


def _train_with_accelerate(program: Program, path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    torch.set_num_threads(1)
    set_seed(SEED, deterministic=True)
    of_loader = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=SEED)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=program.window, dataloader_config=of_loader)
    network = NETWORKS[program.network]()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(network, optimizer, _loader(program, BATCH_SIZE))
    model.train()
    for features, targets in batches:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(features), targets))
            optimizer.step()
            optimizer.zero_grad()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), path)
    accelerator.end_training()


# A trainer, and the numbers of processes that are compared with one.
TRAINERS: dict[str, tuple[Callable[[Program, int, Path], None], tuple[int, ...]]] = {
    "virtual devices": (equipoise, (2, 3)),
    "Lightning": (lightning, (2,)),
    "Lightning with an own sampler": (lightning_in_same_order, (2,)),
    "Accelerate": (accelerate, (2,)),
}


def _weights(train: Callable[[Program, int, Path], None], program: Program, processes: int) -> dict[str, Tensor]:
    """Train in a process group that ends within a limit, and return the weights and buffers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights.pt")
        if not attempt(lambda: train(program, processes, path), Path(folder), LIMIT):
            raise AssertionError("a process was killed")
        weights: dict[str, Tensor] = torch.load(path)
        return weights


def _compared(train: Callable[[Program, int, Path], None], program: Program, numbers: tuple[int, ...]) -> list[str]:
    """Return how far the weights on several processes are from those on one, for each number of processes."""
    cells = []
    one = _weights(train, program, 1)
    for processes in numbers:
        several = _weights(train, program, processes)
        if differences(several, one):
            distance = max((several[name].double() - one[name].double()).abs().max().item() for name in one)
            cells.append(f"{distance:.1e}")
        else:
            cells.append("equal")
    return cells


def main() -> None:
    """Train all programs with all trainers, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=len(PROGRAMS), help="so many programs, from the first")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    columns = [f"{name}, {number} processes" for name, (_, numbers) in TRAINERS.items() for number in numbers]
    print("| program |", " | ".join(columns), "|")
    print("| --- |", " | ".join(["---"] * len(columns)), "|")
    for name, program in list(PROGRAMS.items())[: options.programs]:
        cells = []
        for train, numbers in TRAINERS.values():
            cells += _compared(train, program, numbers)
        print(f"| {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
