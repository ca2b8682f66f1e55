"""Stops a run at a checkpoint and resumes from it with either trainer; and the pieces whose state must survive that."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import equipoise
from tests.support.equality import assert_equal

from . import data
from .harness import Case, Record, execute
from .modules import Classifier

__all__ = [
    "FINAL",
    "TRAINERS",
    "WHOLE",
    "Manual",
    "Scenario",
    "StatefulData",
    "assert_same_parts",
    "by_epoch",
    "by_plateau",
    "every_epoch",
    "every_two_steps",
    "every_validation",
    "longer",
    "resumable",
    "resume",
    "run",
    "scenario",
]

TRAINERS = {"lightning": L.Trainer, "equipoise": equipoise.Trainer}
FINAL = ("weights", "optimizers", "schedulers", "counters")
"""What a resumed run must have in common with one that was never interrupted."""
WHOLE = (*FINAL, "metrics", "generators")
"""What Equipoise brings back besides: it keeps the generators and the sums of the epoch in its checkpoints."""


class Resumable:
    """A loader that can say where it is and resume from there."""

    def __init__(self, batches: int, seed: int) -> None:
        self.batches = list(data.loader(batches, seed))
        self.position = self.start = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.position, self.start = self.start, 0
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position % len(self.batches)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]


def resumable() -> dict[str, Any]:
    return {"train_dataloaders": Resumable(6, 1), "val_dataloaders": data.loader(2, 2)}


def by_epoch(module: Any) -> Any:
    optimizer = SGD(module.parameters(), 0.1, momentum=0.9)
    return [optimizer], [StepLR(optimizer, 1, 0.7)]


def by_plateau(module: Any) -> Any:
    optimizer = SGD(module.parameters(), 0.1, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=1e6, threshold_mode="abs")
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Manual(Classifier):
    """Two optimisers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return SGD(self.net[0].parameters(), 0.1, momentum=0.9), Adam(self.net[-1].parameters(), 0.01)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class StatefulData(L.LightningDataModule):
    """Counts its setups in its state."""

    def __init__(self, batches: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.count = 0

    def train_dataloader(self) -> Any:
        return data.loader(self.hparams.batches, 1)

    def val_dataloader(self) -> Any:
        return data.loader(2, 2)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"] + 1


def every_epoch(*others: Callable[[], Any]) -> Callable[[], Any]:
    """A checkpoint at the end of every epoch."""
    return lambda: [ModelCheckpoint("kept", "{epoch}", save_top_k=-1), *(make() for make in others)]


def every_two_steps() -> Any:
    return [ModelCheckpoint("kept", "{step}", every_n_train_steps=2, save_top_k=-1)]


def every_validation(monitor: str | None = None) -> Any:
    return [ModelCheckpoint("kept", "{step}", monitor=monitor, save_top_k=-1)]


@dataclass(frozen=True)
class Scenario:
    """A case and the checkpoint to resume it from.

    Attributes:
        case: The run up to its planned end.
        checkpoint: The name of the checkpoint from which the second run starts.
        total_epochs: Where the second run ends, if not where the first did.
        exact: Whether Lightning resumes it to the bit itself.
        alike: Whether Equipoise resumes it just as Lightning does; False where Lightning leaves something out.
    """

    case: Case
    checkpoint: str
    total_epochs: int | None = None
    exact: bool = True
    alike: bool = True

    def __str__(self) -> str:
        return self.case.name


def scenario(
    name: str, checkpoint: str, total_epochs: int | None = None, exact: bool = True, alike: bool = True, **case: Any
) -> Scenario:
    """A scenario that saves at the end of every epoch and trains for three, if nothing else is said."""
    case = {"name": name, "callbacks": every_epoch(), "options": {"max_epochs": 3}, **case}
    return Scenario(Case(**case), checkpoint, total_epochs, exact, alike)


def run(case: Case, trainer: str, root: Path, watched: bool = False) -> Record:
    record = execute(case, TRAINERS[trainer], root, watched)
    if record["raised"] is not None:
        raise record["raised"]
    return record


def resume(plan: Scenario, saved: Path, resumer: str, root: Path, watched: bool = False) -> Record:
    """Trains on from the checkpoint of a run.

    Args:
        plan: What is trained.
        saved: The folder of the run that wrote the checkpoint.
        resumer: The trainer that continues.
        root: The folder of the second run.
        watched: Whether its hooks are written down.
    """
    path = saved / "kept" / plan.checkpoint

    def from_checkpoint(trainer: Any, module: Any, given: Any) -> None:
        trainer.fit(module, ckpt_path=path, **given)
        trainer.save_checkpoint("end.ckpt")

    return run(dataclasses.replace(longer(plan), run=from_checkpoint), resumer, root, watched)


def longer(plan: Scenario) -> Case:
    """The case that ends where the resumed run does."""
    if plan.total_epochs is None:
        return plan.case
    return dataclasses.replace(plan.case, options={**plan.case.options, "max_epochs": plan.total_epochs})


def assert_same_parts(names: Sequence[str], expected: Record, actual: Record, title: str) -> None:
    """Compares the named sections of two records."""
    assert_equal({name: expected[name] for name in names}, {name: actual[name] for name in names}, title=title)
