"""Programs drawn from their number, and what remains of them."""

import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from benchmarks.virtual_devices.networks import NETWORKS
from equipoise import LightningModule, Trainer, VirtualDevicesStrategy

__all__ = ["Program", "draw", "fit", "on_one_device", "results", "run"]


@dataclass(frozen=True)
class Program:
    """A training.

    Attributes:
        seed: Its number, from which all else is drawn.
        network: The name of the network.
        data: "shuffled", "weighted" or "augmented".
        count: The number of virtual devices.
        samples: The number of samples.
        batch_size: The number of samples of a step.
        window: The number of batches of an accumulation window.
        precision: The precision of the trainer.
        clip: The largest norm of gradients; None: any.
        devices: The numbers of devices, one for each run that continues the last.
        one_process: Whether the devices of each run belong to one process.
        stops: The numbers of batches after which a run stops and another one continues.
        shares: Whether devices have random shares, which change after each batch where one process has all of them.
        verify: Number of steps that are compared with one device before the fit.
    """

    seed: int
    network: str
    data: str
    count: int
    samples: int
    batch_size: int
    window: int
    precision: str
    clip: float | None
    devices: tuple[int, ...]
    one_process: tuple[bool, ...]
    stops: tuple[int, ...]
    shares: bool
    verify: int


def draw(seed: int) -> Program:
    """Return the program of a number."""
    choice = random.Random(seed)
    stops = tuple(sorted(choice.sample(range(1, 9), choice.choice((0, 0, 1, 2)))))
    batch_size = choice.choice((20, 24, 30))
    network = choice.choice(sorted(NETWORKS))
    # Torch has no norm of sparse gradients.
    clip = choice.choice((None, None if network == "sparse embedding" else 0.5))
    count = choice.choice((4, 5, 8))
    one_process = tuple(choice.random() < 0.4 for _ in (0, *stops))
    devices = []
    for is_one in one_process:
        # A single run on a single device would be compared with itself.
        numbers = [2, 3, 4, 1][: 3 + bool(stops)]
        if is_one:
            numbers.append(min(8, count))
        devices.append(choice.choice(numbers))
    return Program(
        seed=seed,
        network=network,
        data=choice.choice(("shuffled", "weighted", "augmented")),
        count=count,
        # Each part has two samples for the statistics of a batch, also in an uneven last batch.
        samples=4 * batch_size + choice.choice((0, 17, 19)),
        batch_size=batch_size,
        window=choice.choice((1, 3)),
        precision=choice.choice(("32-true", "bf16-mixed")),
        clip=clip,
        devices=tuple(devices),
        one_process=one_process,
        stops=stops,
        shares=choice.random() < 0.3,
        verify=choice.choice((*[0] * 9, 2)),
    )


class Task(LightningModule):
    """Trains a network, and logs what it sees.

    Args:
        program: The program.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.network = NETWORKS[program.network]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss on a part."""
        features, targets = batch
        if self.program.network != "rows":
            features = features * random.uniform(0.9, 1.1) + 0.05 * float(np.random.randn())
        loss = nn.functional.mse_loss(self.network(features).float(), targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", features.max(), reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss on a batch, beside a random number."""
        features, targets = batch
        loss = nn.functional.mse_loss(self.network(features).float(), targets)
        self.log_dict({"val_loss": loss, "val_random": torch.rand(())})

    def configure_optimizers(self) -> Any:
        """Return the optimiser and a schedule by step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.program.network == "sparse embedding":
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Augmented(Dataset[Any]):
    """Samples that are changed by three generators.

    Args:
        data: The samples.
    """

    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features, target = self.data[index]
        return features * random.uniform(0.8, 1.2) + 0.1 * torch.randn(8) + 0.01 * float(np.random.rand()), target


class SaveAndStop(L.Callback):
    """Saves a checkpoint after a batch of the run, counted over all epochs, and ends it.

    Args:
        batches: The number of the batch, from 1.
        path: The path of the checkpoint.
    """

    def __init__(self, batches: int, path: Path) -> None:
        self.batches = batches
        self.path = path

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        """Save at the batch."""
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.batches:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


class OtherShares(L.Callback):
    """Shares out the virtual devices in another way after each batch.

    Args:
        devices: The number of devices.
    """

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.choice = random.Random(devices)

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        """Draw shares."""
        shares = self.choice.choices((1, 2, 5), k=self.devices)
        trainer.connected_strategy.shares = shares


def _loaders(program: Program) -> tuple[DataLoader[Any], DataLoader[Any]]:
    numbers = torch.Generator().manual_seed(program.seed)
    features = torch.randn(program.samples, 8, generator=numbers)
    data: Dataset[Any] = TensorDataset(features, features.sin().sum(1, keepdim=True))
    evaluated = DataLoader(data, batch_size=14)
    options: dict[str, Any] = {"shuffle": True}
    if program.data == "weighted":
        weights = torch.arange(1.0, program.samples + 1).tolist()
        options = {"sampler": WeightedRandomSampler(weights, program.samples)}
    elif program.data == "augmented":
        data = Augmented(data)
        options |= {"num_workers": 2}
    return DataLoader(data, batch_size=program.batch_size, **options), evaluated


def on_one_device(program: Program) -> Program:
    """Return the same program on one device, without a stop."""
    return replace(program, devices=(1,), one_process=(False,), stops=(), verify=0)


def run(program: Program) -> dict[str, Any]:
    """Train, and return everything that must be equal."""
    with tempfile.TemporaryDirectory() as folder:
        path: Path | None = None
        for index, place in enumerate(zip(program.devices, program.one_process, strict=True)):
            next_path = Path(folder, f"{index}.ckpt")
            callbacks: list[Any] = [ModelCheckpoint(folder, monitor="val_loss", filename="best-{epoch}")]
            if index < len(program.stops):
                callbacks.append(SaveAndStop(program.stops[index], next_path))
            trainer = fit(program, *place, path, callbacks)
            path = next_path
        return results(trainer, callbacks[0])


def results(trainer: Any, best: Any) -> dict[str, Any]:
    """Return everything that must be equal at the end of a run.

    Args:
        trainer: The trainer.
        best: The callback that has kept the best checkpoint.
    """
    module = trainer.lightning_module
    states = {**module.state_dict(), **trainer.callback_metrics, "best": best.best_model_score}
    for number, optimizer in enumerate(trainer.optimizers):
        for index, entries in optimizer.state_dict()["state"].items():
            states |= {f"optimizer.{number}.{index}.{name}": value for name, value in entries.items()}
    return states


def fit(
    program: Program,
    devices: int,
    one_process: bool,
    path: Path | str | None,
    callbacks: list[Any],
    **options: Any,
) -> Trainer:
    """Train, and return the trainer.

    Args:
        program: The program.
        devices: The number of devices.
        one_process: Whether one process computes on all of them.
        path: The checkpoint from which the run continues; "last": the newest one of its callbacks, None: it begins.
        callbacks: The callbacks.
        options: Further arguments of the trainer.
    """
    L.seed_everything(program.seed, verbose=False)
    shares = None
    if program.shares:
        shares = random.Random(devices).choices((1, 2, 5), k=devices)
        if one_process:
            callbacks.append(OtherShares(devices))
    strategy = VirtualDevicesStrategy(
        count=program.count,
        shares=shares,
        one_process=one_process,
    )
    trainer = Trainer(
        verify=program.verify,
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=2,
        precision=program.precision,
        accumulate_grad_batches=program.window,
        gradient_clip_val=program.clip,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Task(program), *_loaders(program), ckpt_path=path)
    return trainer
