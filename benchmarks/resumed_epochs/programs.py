"""Programs that keep state which hooks and steps have set, each in another place.

Every program is a class below `Program`. `weight` is a factor of the loss: state that is lost changes the weights.
"""

import random
from collections import Counter, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

__all__ = ["PROGRAMS", "Program"]

SAMPLES = 14
PROGRAMS: dict[str, type["Program"]] = {}


class Rows(Dataset[Tensor]):
    """Rows of numbers, whose scale a program may change."""

    scale = 1.0

    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] * self.scale


class Program(L.LightningModule):
    """A perceptron. Its subclasses keep state, in the module, a callback, the data or the data module."""

    def __init_subclass__(cls) -> None:
        PROGRAMS[cls.__name__] = cls

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 1)).double()
        self.data = self.make_data()

    def make_data(self) -> Any:
        return Rows()

    def loaders(self) -> dict[str, Any]:
        """Return what `fit` takes beside the module."""
        is_stream = isinstance(self.data, IterableDataset)
        train = DataLoader(self.data, batch_size=2, shuffle=None if is_stream else True)
        return {"train_dataloaders": train, "val_dataloaders": DataLoader(Rows(), batch_size=7)}

    def callbacks_of_it(self) -> list[L.Callback]:
        return []

    def weight(self, batch_idx: int) -> Any:
        return 1.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean() * self.weight(batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def kept(self) -> Any:
        """Return the state that the program keeps, for the comparison."""
        return None


# In the module


class WeightOfAnEpoch(Program):
    def on_train_epoch_start(self) -> None:
        self.beta = 0.5**self.current_epoch

    def weight(self, batch_idx: int) -> Any:
        return self.beta


class CountedSteps(Program):
    steps = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.steps += 1

    def weight(self, batch_idx: int) -> Any:
        return 1 / self.steps

    def kept(self) -> Any:
        return self.steps


class CountedAfterSteps(Program):
    def on_train_start(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1

    def weight(self, batch_idx: int) -> Any:
        return 1 / (1 + self.steps)

    def kept(self) -> Any:
        return self.steps


class ListOfLosses(Program):
    def setup(self, stage: str) -> None:
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.losses).mean())
        self.losses.clear()

    def kept(self) -> Any:
        return self.losses


class RunningMean(Program):
    mean: Any = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        value = loss.detach()
        self.mean = value if self.mean is None else 0.9 * self.mean + 0.1 * value
        return loss / (1 + self.mean)

    def kept(self) -> Any:
        return self.mean


class Anchor(Program):
    def on_train_epoch_start(self) -> None:
        self.anchor = [parameter.detach().clone() for parameter in self.parameters()]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        distances = [(one - other).square().sum() for one, other in zip(self.parameters(), self.anchor, strict=True)]
        return super().training_step(batch, batch_idx) + sum(distances)


class AnchorOfTheStart(Program):
    def on_train_start(self) -> None:
        self.anchor = [parameter.detach().clone() for parameter in self.parameters()]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        distances = [(one - other).square().sum() for one, other in zip(self.parameters(), self.anchor, strict=True)]
        return super().training_step(batch, batch_idx) + 0.1 * sum(distances)


class DropoutThatGrows(Program):
    def on_train_epoch_start(self) -> None:
        self.net[2].p = 0.1 * (1 + self.current_epoch)


class FrozenPart(Program):
    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch != 1)
        self.net[2].train(self.current_epoch != 2)


class LearningRateByHand(Program):
    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


class HiddenTeacher(Program):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = [nn.Linear(3, 1).double()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.teacher[0].weight.mul_(0.9).add_(0.1 * batch.mean(0))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        distance = (self.net(batch) - self.teacher[0](batch).detach()).square().mean()
        return super().training_step(batch, batch_idx) + distance

    def kept(self) -> Any:
        return self.teacher[0].weight.detach()


class ReplayBuffer(Program):
    def __init__(self) -> None:
        super().__init__()
        self.replay: deque[Tensor] = deque(maxlen=5)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.replay.append(batch.detach().clone())
        loss = super().training_step(batch, batch_idx)
        return loss + self.net(random.choice(self.replay)).square().mean()

    def kept(self) -> Any:
        return list(self.replay)


class OwnGenerators(Program):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)
        self.numbers = np.random.default_rng(6)
        self.python = random.Random(7)

    def weight(self, batch_idx: int) -> Any:
        return torch.rand((), generator=self.generator) + float(self.numbers.random()) + self.python.random()


class UnsavedBuffer(Program):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64), persistent=False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.scale.mul_(0.95)

    def weight(self, batch_idx: int) -> Any:
        return self.scale.clone()


class ObjectOfTheUser(Program):
    def on_fit_start(self) -> None:
        self.schedule = SimpleNamespace(level=1.0, history=[])

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.schedule.level *= 0.7
            self.schedule.history.append(self.global_step)

    def weight(self, batch_idx: int) -> Any:
        return self.schedule.level

    def kept(self) -> Any:
        return self.schedule.history


class CountersByName(Program):
    def on_train_start(self) -> None:
        self.counts: Counter[str] = Counter()
        self.sums: defaultdict[str, float] = defaultdict(float)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.counts[f"batch {batch_idx % 3}"] += 1
        self.sums["all"] += float(batch.sum())

    def weight(self, batch_idx: int) -> Any:
        return 1 + 0.01 * self.counts["batch 1"] + 0.001 * self.sums["all"]

    def kept(self) -> Any:
        return dict(self.counts), dict(self.sums)


class MadeAtTheEpochsStart(Program):
    """An object that no file can hold is made again, and what it counts continues."""

    def on_train_epoch_start(self) -> None:
        self.meter = Meter()

    def weight(self, batch_idx: int) -> Any:
        self.meter.add(batch_idx)
        return 1 / self.meter.total

    def kept(self) -> Any:
        return self.meter.total


class Meter:
    """Sums what it receives."""

    def __init__(self) -> None:
        self.total = 1.0

    def add(self, value: float) -> None:
        """Adds a value."""
        self.total += value


class Hyperparameters(Program):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"temperature": 1.0})

    def on_train_epoch_end(self) -> None:
        self.hparams.temperature *= 0.8

    def weight(self, batch_idx: int) -> Any:
        return self.hparams.temperature


class Array(Program):
    def __init__(self) -> None:
        super().__init__()
        self.histogram = np.zeros(7)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.histogram[batch_idx] += abs(float(batch[0, 0]))

    def weight(self, batch_idx: int) -> Any:
        return 1 / (1 + self.histogram.sum())

    def kept(self) -> Any:
        return self.histogram.tolist()


# In the trainer and in callbacks


class Accumulation(Program):
    def callbacks_of_it(self) -> list[L.Callback]:
        return [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]


class AccumulationByHand(Program):
    def on_train_epoch_start(self) -> None:
        self.trainer.accumulate_grad_batches = 1 + self.current_epoch


class ClippingThatShrinks(Program):
    def on_train_epoch_start(self) -> None:
        self.trainer.gradient_clip_val = 0.1 / (1 + self.current_epoch)


class InACallback(Program):
    factor = 1.0

    class Warmup(L.Callback):
        """Counts, and sets a value in the module."""

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.start = trainer.current_epoch + 1

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.batches = getattr(self, "batches", 0) + self.start
            pl_module.factor = 1 / self.batches

    def callbacks_of_it(self) -> list[L.Callback]:
        return [self.Warmup()]

    def weight(self, batch_idx: int) -> Any:
        return self.factor


class BestOfACallback(Program):
    class Best(L.Callback):
        """Keeps the best value of the validation, without a `state_dict`."""

        best = float("inf")
        waited = 0

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            value = float(trainer.callback_metrics["val_loss"])
            if not trainer.sanity_checking:
                self.waited = 0 if value < self.best else self.waited + 1
                self.best = min(value, self.best)
                pl_module.found = self.best

    found = 1.0

    def callbacks_of_it(self) -> list[L.Callback]:
        return [self.Best()]

    def weight(self, batch_idx: int) -> Any:
        return 1 + self.found


# In the data


class StreamByEpoch(IterableDataset[Tensor]):
    """A stream whose order depends on the epoch."""

    epoch = 0

    def __init__(self) -> None:
        self.rows = Rows().rows

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch."""
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        return iter(self.rows[order])


class StreamSetByTheTrainer(Program):
    def make_data(self) -> Any:
        return StreamByEpoch()


class StreamSetByAHook(Program):
    def make_data(self) -> Any:
        return StreamByEpoch()

    def on_train_epoch_start(self) -> None:
        self.data.set_epoch(40 + self.current_epoch)


class StreamInWorkers(StreamSetByTheTrainer):
    def loaders(self) -> dict[str, Any]:
        return {"train_dataloaders": DataLoader(self.data, batch_size=2, num_workers=1)}


class StreamThatCounts(Program):
    class Counting(StreamByEpoch):
        """Counts its passes by itself."""

        def __iter__(self) -> Any:
            self.epoch += 1
            return super().__iter__()

        set_epoch: Any = None

    def make_data(self) -> Any:
        return self.Counting()


class ScaleOfTheData(Program):
    def on_train_epoch_start(self) -> None:
        self.data.scale = 1 + self.current_epoch


class ScaleInWorkers(ScaleOfTheData):
    def loaders(self) -> dict[str, Any]:
        return {"train_dataloaders": DataLoader(self.data, batch_size=2, num_workers=1, shuffle=True)}


class OwnSampler(Program):
    class Rising(Sampler[int]):
        """Draws from a part of the data that grows."""

        most = 8

        def __iter__(self) -> Any:
            return iter((torch.randperm(self.most).tolist() * 2)[:SAMPLES])

        def __len__(self) -> int:
            return SAMPLES

    def loaders(self) -> dict[str, Any]:
        self.sampler = [self.Rising()]
        return {"train_dataloaders": DataLoader(self.data, batch_size=2, sampler=self.sampler[0])}

    def on_train_epoch_start(self) -> None:
        self.sampler[0].most = 8 + 2 * self.current_epoch


class InTheDataModule(Program):
    class Data(L.LightningDataModule):
        """Counts the batches that it has transferred."""

        def __init__(self) -> None:
            super().__init__()
            self.transferred = 0

        def setup(self, stage: str) -> None:
            self.rows = Rows()

        def train_dataloader(self) -> Any:
            return DataLoader(self.rows, batch_size=2, shuffle=True)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.transferred += 1
            return batch / self.transferred

    def loaders(self) -> dict[str, Any]:
        return {"datamodule": self.Data()}


class WithItsOwnState(Program):
    """A program that saves and restores its state by itself."""

    level = 1.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.level *= 0.9

    def weight(self, batch_idx: int) -> Any:
        return self.level

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["level"] = self.level

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.level = checkpoint["level"]
