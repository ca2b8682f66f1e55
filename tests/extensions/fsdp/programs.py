"""Modules that are trained in shards, and several runs in one launch of processes, which costs more than a run."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import FSDPStrategy, Trainer
from equipoise.strategies.distributed.process_group import ProcessGroup
from tests.support import quiet

__all__ = [
    "FEATURES",
    "QUIET",
    "STEP",
    "Block",
    "Net",
    "assert_close",
    "assert_each_close",
    "errors_of",
    "fit",
    "fsdp",
    "in_processes",
    "loader",
    "make",
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

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch))

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
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        difference = torch.as_tensor(value).double() - torch.as_tensor(actual[name]).double()
        # Not a number is a difference, too.
        assert float(difference.abs().max()) <= tolerance, name


def assert_each_close(
    expected: Callable[[str], dict[str, Any]], outcomes: dict[str, dict[str, Any]], tolerance: float = 1e-12
) -> None:
    """Assert that the numbers and tensors of several cases agree, by the name of the case."""
    for name, values in outcomes.items():
        try:
            assert_close(expected(name), values, tolerance)
        except AssertionError as error:
            error.add_note(f"in the case {name!r}")
            raise


def errors_of(runs: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Return the class, the message and the notes of the error in which each run ends."""
    found = {}
    for name, run in runs.items():
        try:
            run()
        except Exception as error:
            found[name] = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        else:
            raise AssertionError(f"{name!r} is not refused")
    return found


def in_processes(count: int, function: Callable[[], Any]) -> Any:
    """Return what a function returns in the first of several processes that are one group."""
    devices = [torch.device("cpu")] * count
    group = ProcessGroup(devices, 1, timeout=120.0, backend=None, on_joined=_nothing)
    return group.launch(function)


def _nothing() -> None:
    pass
