"""Accumulation over windows of batches, and clipping.

Full windows of equal batches are Lightning's to the bit. A short or uneven window is the gradient of its union here,
where Lightning divides by the nominal number of batches: `tests/trainer/optimization/test_accumulation.py`.
"""

from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler

from .. import data
from ..harness import Case, Record, parity
from ..modules import Classifier


def windows(count: int, **options: Any) -> dict[str, Any]:
    return {"accumulate_grad_batches": count, **options}


def steps(record: Record) -> int:
    return int(record["counters"]["global_step"])


CASES = [
    Case(name="two", options=windows(2), proves=lambda r: steps(r) == 6),
    Case(name="two-with-validation-inside-a-window", options=windows(2, val_check_interval=3)),
    Case(
        name="two-with-batch-norm-and-dropout",
        module=lambda: Classifier(0.3, batch_norm=True),
        options=windows(2),
        data=data.shuffled,
    ),
    Case(name="two-with-max-steps", options=windows(2, max_epochs=-1, max_steps=5)),
    Case(
        name="scheduled-by-epoch",
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})],
        options={"max_epochs": 3},
        proves=lambda r: steps(r) == 6 + 3 + 2,
    ),
    Case(name="clip-norm", options={"gradient_clip_val": 0.05}),
    Case(name="clip-zero", options={"gradient_clip_val": 0.0}),
    Case(name="clip-value-accumulated", options=windows(3, gradient_clip_val=0.01, gradient_clip_algorithm="value")),
]

test_parity = parity(CASES)
