"""Accumulation over windows of batches, and clipping.

Full windows of equal batches are Lightning's to the bit. A short or uneven window is the gradient of its union here,
where Lightning divides by the nominal number of batches: these are held against a union computed by hand.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

import equipoise

from . import data
from .data import CLASSES, FEATURES
from .harness import DEFAULTS, Case, Record, parity
from .modules import Classifier, with_optimizers


def adamw(module: Any) -> AdamW:
    return AdamW(module.parameters(), 0.01)


def windows(count: int, **options: Any) -> dict[str, Any]:
    return {"accumulate_grad_batches": count, **options}


def steps(record: Record) -> int:
    return int(record["counters"]["global_step"])


def eight() -> dict[str, Any]:
    return data.sized(train=8)


CASES = [
    Case(name="two", options=windows(2), proves=lambda r: steps(r) == 6),
    Case(name="three", options=windows(3), proves=lambda r: steps(r) == 4),
    Case(name="whole-epoch", options=windows(6), proves=lambda r: steps(r) == 2),
    Case(
        name="four-with-adamw",
        module=with_optimizers(adamw),
        data=eight,
        options=windows(4),
        proves=lambda r: steps(r) == 4,
    ),
    Case(name="two-with-validation-inside-a-window", options=windows(2, val_check_interval=3)),
    Case(
        name="two-with-batch-norm-and-dropout",
        module=lambda: Classifier(0.3, batch_norm=True),
        options=windows(2),
        data=data.shuffled,
    ),
    Case(name="two-with-max-steps", options=windows(2, max_epochs=-1, max_steps=5)),
    Case(name="two-unsized", data=data.unsized, options=windows(2), proves=lambda r: steps(r) == 6),
    Case(name="two-in-half-precision", options=windows(2, precision="bf16-mixed")),
    Case(
        name="scheduled-by-epoch",
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})],
        options={"max_epochs": 3},
        proves=lambda r: steps(r) == 6 + 3 + 2,
    ),
    Case(name="clip-norm", options={"gradient_clip_val": 0.05}),
    Case(name="clip-norm-not-reached", options={"gradient_clip_val": 100, "gradient_clip_algorithm": "norm"}),
    Case(name="clip-value", options={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    Case(name="clip-zero", options={"gradient_clip_val": 0.0}),
    Case(name="clip-norm-accumulated", options=windows(2, gradient_clip_val=0.05)),
    Case(name="clip-value-accumulated", options=windows(3, gradient_clip_val=0.01, gradient_clip_algorithm="value")),
    Case(name="clip-norm-in-half-precision", options={"gradient_clip_val": 0.05, "precision": "bf16-mixed"}),
    Case(name="every-second-epoch-short-limit", options=windows(2, limit_train_batches=4, check_val_every_n_epoch=2)),
]

test_parity = parity(CASES)


class Plain(Classifier):
    """SGD without momentum in float64, so a step shows its gradient."""

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), 0.1)


class Skips(Plain):
    """Has no loss for every fourth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 4 == 2 else super().training_step(batch, batch_idx)


def by_hand(module: Plain, batches: list[list[Tensor]], window: int) -> None:
    """One step for the union of the batches of each window, but those that are skipped."""
    optimizer = module.configure_optimizers()
    for start in range(0, len(batches), window):
        used = [
            i for i in range(start, min(start + window, len(batches))) if not isinstance(module, Skips) or i % 4 != 2
        ]
        if not used:
            continue
        union = [torch.cat(parts) for parts in zip(*(batches[i] for i in used), strict=True)]
        optimizer.zero_grad()
        module.loss(union).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore")  # Lightning points out the missing validation loader
@pytest.mark.parametrize("kind", [Plain, Skips])
@pytest.mark.parametrize("seed", range(6))
def test_short_and_uneven_windows_are_the_gradient_of_their_union(seed: int, kind: type[Plain], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 7, (5 + seed,), generator=generator).tolist() if seed % 2 else [4] * (5 + seed)
    window = 2 + seed % 3
    features = torch.randn(sum(sizes), FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (sum(sizes),), generator=generator)
    dataset = TensorDataset(features, labels)
    indices = [part.tolist() for part in torch.arange(sum(sizes)).split(sizes)]
    batches = [[features[part], labels[part]] for part in indices]

    torch.manual_seed(seed)
    expected, module = kind().double(), kind().double()
    module.load_state_dict(expected.state_dict())
    by_hand(expected, batches, window)
    options = {
        **DEFAULTS,
        "max_epochs": 1,
        "accumulate_grad_batches": window,
        "logger": False,
        "enable_checkpointing": False,
    }
    equipoise.Trainer(**options, default_root_dir=tmp_path).fit(module, DataLoader(dataset, batch_sampler=indices))

    for (name, value), other in zip(module.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            value, other, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}, sizes {sizes}: {text}"
        )
