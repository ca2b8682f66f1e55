"""Steps that pull their batches by themselves: weights, hooks, values and counters are Lightning's.

Where they are not, on purpose, `tests/trainer/loops/test_iterator_epoch.py` says what they are.
"""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor

from . import data
from .harness import Case, Record, column, parity
from .modules import Classifier, with_optimizers
from .resumption import by_plateau, by_step
from .test_evaluation import everything


class Pulls(Classifier):
    """Pulls so many batches in each step, fewer where the epoch has no more."""

    def __init__(self, batches: int = 1, dropout: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__(dropout, batch_norm)
        self.batches = batches

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        losses: list[Tensor] = []
        samples = 0
        while len(losses) < self.batches and (pulled := next(dataloader_iter, None)) is not None:
            batch, batch_idx, dataloader_idx = pulled
            self.log("index", float(batch_idx + dataloader_idx), on_epoch=False, batch_size=1)
            losses.append(self.loss(batch))
            samples += len(batch[1])
        loss = torch.stack(losses).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=samples)
        self.log("samples", float(samples), on_step=False, on_epoch=True, reduce_fx="sum", batch_size=samples)
        return loss


class Prefetches(Pulls):
    """Pulls one batch ahead of the one it trains on."""

    ahead: Any = None

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        if self.ahead is None:
            self.ahead = next(dataloader_iter)[0]
        batch, self.ahead = self.ahead, next(dataloader_iter)[0]
        return self.loss(batch)


class Exhausts(Pulls):
    """Pulls a whole epoch in one step."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        return torch.stack([self.loss(batch) for batch, _, _ in dataloader_iter]).mean()


class Combined(Pulls):
    """Pulls two batches of several loaders each."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        (first, _, _), (second, batch_idx, _) = next(dataloader_iter), next(dataloader_iter, (None, -1, 0))
        given = [first] if second is None else [first, second]
        self.log("index", float(batch_idx), batch_size=1)
        losses = [self.loss(batch) for batches in given for batch in batches.values() if batch is not None]
        return torch.stack(losses).mean()


class PullsByHand(Pulls):
    """Optimises by hand, twice in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            batch, _, _ = next(dataloader_iter)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("train_loss", loss, batch_size=4)


class Skips(Pulls):
    """Returns no loss for every third batch."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return None if batch_idx % 3 == 1 else self.loss(batch)


class LeavesEpoch(Pulls):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class StopsInStep(Pulls):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        self.trainer.should_stop = self.global_step == 4
        return super().training_step(dataloader_iter)


class Evaluates(Pulls):
    """Pulls its batches in evaluations and predictions, too."""

    def evaluated(self, stage: str, dataloader_iter: Iterator[Any]) -> Tensor:
        outputs: list[Tensor] = []
        while len(outputs) < self.batches and (pulled := next(dataloader_iter, None)) is not None:
            (features, labels), batch_idx, dataloader_idx = pulled
            outputs.append(self(features))
            self.log(f"{stage}_index", float(batch_idx + dataloader_idx), batch_size=1)
            self.log(f"{stage}_samples", float(len(labels)), reduce_fx="sum", batch_size=1)
        output = torch.cat(outputs)
        self.log(f"{stage}_mean", output.mean(), on_step=True, on_epoch=True, batch_size=len(output))
        return output.mean()

    def validation_step(self, dataloader_iter: Iterator[Any]) -> Any:
        return self.evaluated("val", dataloader_iter)

    def test_step(self, dataloader_iter: Iterator[Any]) -> Any:
        return self.evaluated("test", dataloader_iter)

    def predict_step(self, dataloader_iter: Iterator[Any]) -> Any:
        return torch.cat([self(batch[0]) for batch, _, _ in [next(dataloader_iter)]])


class EvaluatesOnly(Evaluates):
    """Trains on the batches that it is given."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Classifier.training_step(self, batch, batch_idx)


def pulls(batches: int, dropout: float = 0.0, base: type[Pulls] = Pulls) -> Any:
    return lambda: base(batches, dropout)


def indices(record: Record) -> list[float]:
    return column(record, "index")


def only_training(batches: int = 6) -> dict[str, Any]:
    return {"train_dataloaders": data.loader(batches, 1)}


CASES = [
    Case(name="one batch a step", module=pulls(1), proves=lambda record: indices(record) == [0, 1, 2, 3, 4, 5] * 2),
    Case(name="two batches a step", module=pulls(2), proves=lambda record: indices(record) == [1, 3, 5] * 2),
    Case(name="a short last step", module=pulls(4), proves=lambda record: indices(record) == [3, 5] * 2),
    Case(name="a short last batch", module=pulls(2), data=lambda: data.sized(5, odd=3)),
    Case(name="all batches in one step", module=Exhausts),
    Case(name="combined loaders", module=Combined, data=lambda: data.combined("max_size_cycle")),
    Case(
        name="limited to a number",
        module=pulls(2),
        options={"limit_train_batches": 5},
        proves=lambda record: indices(record) == [1, 3, 4] * 2,
    ),
    Case(name="prefetching", module=Prefetches, data=only_training),
    Case(name="by hand", module=PullsByHand),
    Case(name="skipped steps", module=Skips),
    Case(name="left by on_train_batch_start", module=LeavesEpoch),
    Case(name="stopped in a step", module=StopsInStep),
    Case(name="max_steps", module=pulls(2), options={"max_steps": 4, "max_epochs": -1}),
    Case(name="validation inside", module=pulls(1), options={"val_check_interval": 2}),
    Case(name="validation inside, by steps of two", module=pulls(2), options={"val_check_interval": 2}),
    Case(name="scheduler by step", module=with_optimizers(by_step, Pulls, batches=2)),
    Case(name="scheduler by a value", module=with_optimizers(by_plateau, Pulls, batches=2), options={"max_epochs": 4}),
    Case(
        name="checkpoints and early stopping",
        module=pulls(2),
        options={"max_epochs": 4},
        callbacks=lambda: [
            ModelCheckpoint(monitor="val_loss", save_top_k=2),
            EarlyStopping("val_loss", patience=1),
            LearningRateMonitor(),
        ],
        ignore=["best_model", "checkpoint"],
    ),
    Case(
        name="averaged weights, with an epoch for the batch statistics",
        module=lambda: Pulls(batch_norm=True),
        callbacks=lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=1)],
        options={"max_epochs": 4},
    ),
]


LAST = ["is_last_batch"]
"""Lightning looks before the step, in which the last batch is pulled."""
CASES += [
    Case(name=f"{kind.__name__}, {batches} in a step", module=pulls(batches, base=kind), run=everything, ignore=LAST)
    for batches in (1, 2)
    for kind in (Evaluates, EvaluatesOnly)
]
CASES += [
    Case(
        name="limited evaluations",
        module=pulls(2, base=Evaluates),
        run=everything,
        options={"limit_val_batches": 3, "limit_test_batches": 1, "limit_predict_batches": 2, "val_check_interval": 2},
        ignore=LAST,
    ),
]

test_dataloader_iter = parity(CASES)
