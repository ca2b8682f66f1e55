"""A network that is trained in shards, and several runs in one launch of processes, which costs more than a run."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import FSDPStrategy, Trainer
from equipoise.strategies.distributed.process_group import ProcessGroup
from tests.support import quiet
from tests.support.equality import assert_equal

__all__ = [
    "FEATURES",
    "QUIET",
    "STEP",
    "Block",
    "Net",
    "SavesAfter",
    "assert_close",
    "assert_refused_in_processes",
    "assert_same_cases",
    "assert_same_in_processes",
    "errors_of",
    "fit",
    "fsdp",
    "in_processes",
    "loader",
    "make",
    "outcome",
    "weights_of",
]

FEATURES = 8
# Of a step, for all processes together: 2, 3 and 4 of them have equal shares.
STEP = 12

QUIET: dict[str, Any] = {**quiet.QUIET, "num_sanity_val_steps": 0}


class Block(nn.Module):
    """A residual block, of which deep networks have many."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Net(L.LightningModule):
    """Three blocks between two layers; its width shares out unevenly over 2 processes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.last = nn.Linear(7, 1)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def make(kind: Callable[[], Any]) -> Any:
    """Return a module with the same weights in every process."""
    torch.manual_seed(3)
    return kind()


def loader(count: int, batch_size: int, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(count, FEATURES, generator=draw, dtype=torch.float64).to(dtype)
    targets = torch.randn(count, 1, generator=draw, dtype=torch.float64).to(dtype)
    return DataLoader(TensorDataset(features, targets), batch_size=batch_size)


def fsdp(**options: Any) -> FSDPStrategy:
    return FSDPStrategy(**{"timeout": 120.0, **options})


def fit(
    kind: Callable[[], Any],
    strategy: Any = "single_device",
    processes: int = 1,
    *,
    count: int = 49,
    batch_size: int | None = None,
    module: Any = None,
    ckpt_path: Any = None,
    **options: Any,
) -> tuple[Any, Trainer]:
    """Train two epochs with 12 samples in a step, and validate after each. `batch_size` is that of a process.

    With 49 samples, the last step has one: all processes but one are without a batch.
    """
    options = {"precision": "64-true", "max_epochs": 2, **QUIET, **options}
    trainer = Trainer(strategy=strategy, devices=["cpu"] * processes, **options)
    module = make(kind) if module is None else module
    dtype = torch.float64 if options["precision"] == "64-true" else torch.float32
    training, validation = loader(count, batch_size or STEP // processes, dtype), loader(7, 3, dtype)
    trainer.fit(module, training, validation, ckpt_path=ckpt_path)
    return module, trainer


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_close(expected: dict[str, Any], actual: dict[str, Any], tolerance: float = 1e-12) -> None:
    """Assert that numbers and tensors by name agree."""
    assert_equal(dict(expected), dict(actual), tolerance)


def outcome(
    kind: Callable[[], Any],
    strategy: Any = "single_device",
    processes: int = 1,
    *,
    again: bool = False,
    predicts: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Return all weights and logged values of a fit, and, if asked, predictions after it, and those of a second fit."""
    options = copy.deepcopy(options)
    module, trainer = fit(kind, strategy, processes, **options)
    values = {f"first {name}": value for name, value in {**trainer.callback_metrics, **weights_of(module)}.items()}
    if predicts:
        values["predictions"] = torch.cat(trainer.predict(module, loader(7, 3)) or [])  # type: ignore[arg-type]
    if again:
        module, trainer = fit(kind, strategy, processes, **{**options, "max_epochs": 1, "module": module})
        values |= {**trainer.callback_metrics, **weights_of(module)}
    return values


def in_processes(count: int, function: Callable[[], Any]) -> Any:
    """Return what a function returns in the first of several processes that are one group."""
    devices = [torch.device("cpu")] * count
    group = ProcessGroup(devices, 1, timeout=120.0, backend=None, on_joined=_nothing)
    return group.launch(function)


def _nothing() -> None:
    pass


Calls = Mapping[str, Callable[[], Any]]


def _results(calls: Calls) -> dict[str, Any]:
    return {name: call() for name, call in calls.items()}


def assert_same_in_processes(count: int, expected: Calls, calls: Calls, tolerance: float = 1e-12) -> None:
    """Assert that calls by name return in one launch of processes what their counterparts return in this process.

    Args:
        count: The number of processes.
        expected: What is called in this process, by the names of all calls or more.
        calls: What is called in each process.
        tolerance: Largest difference of the numbers that are returned.
    """
    for name, result in in_processes(count, partial(_results, calls)).items():
        assert_equal(expected[name](), result, tolerance, title=f"Results of {name!r}")


def assert_same_cases(
    count: int, cases: Sequence[str], expected: Callable[[str], Any], actual: Callable[[str], Any]
) -> None:
    """Assert that a function of a case returns in each process what another one returns in this process."""
    calls = ({case: partial(function, case) for case in cases} for function in (expected, actual))
    assert_same_in_processes(count, *calls)


def errors_of(runs: Calls) -> dict[str, str]:
    """Return the class, the message and the notes of the error in which each run ends; the same in all processes."""
    found = {}
    for name, run in runs.items():
        try:
            run()
        except Exception as error:
            found[name] = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        else:
            raise AssertionError(f"{name!r} is not refused")
    return found


def assert_refused_in_processes(count: int, runs: Calls, cases: Mapping[str, Sequence[Any]]) -> None:
    """Assert that each run ends with an error in whose class, message and notes words stand, in one launch.

    Args:
        count: The number of processes.
        runs: What is called in each process.
        cases: Tuples for the same names, whose last entry is the words, or a list of them.
    """
    found = in_processes(count, partial(errors_of, runs))
    assert found.keys() == cases.keys()
    for name, error in found.items():
        words = cases[name][-1]
        missing = [part for part in ([words] if isinstance(words, str) else words) if part not in error]
        assert not missing, f"{name}: {missing} not in {error}"


# Checkpoints


class SavesAfter(Callback):
    """Saves once, behind a batch of an epoch."""

    def __init__(self, path: Path | str, batch: int, epoch: int = 0) -> None:
        self.path = path
        self.place = (epoch, batch)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == self.place:
            trainer.save_checkpoint(self.path)
