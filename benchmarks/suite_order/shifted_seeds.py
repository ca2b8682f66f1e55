"""A pytest plugin that adds the number in SEED_SHIFT to every seed that tests set: other data, other weights.

A test that holds for one seed alone has met a lucky case.
"""

import os
import random
from typing import Any

import pytest
import torch

SHIFT = int(os.environ.get("SEED_SHIFT", "0"))


class ShiftedGenerator(torch.Generator):
    """A generator whose seeds are shifted."""

    def manual_seed(self, seed: int) -> torch.Generator:
        """Set the seed, and the shift added."""
        return super().manual_seed(seed + SHIFT)


@pytest.fixture(autouse=True)
def shifted_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shift the seeds of torch's and Python's generators in a test and its fixtures."""
    torch_seed = torch.manual_seed
    python_seed = random.seed

    def seed_torch(seed: int) -> torch.Generator:
        return torch_seed(seed + SHIFT)

    def seed_python(seed: Any = None, *args: Any) -> None:
        python_seed(seed + SHIFT if isinstance(seed, int) else seed, *args)

    monkeypatch.setattr(torch, "manual_seed", seed_torch)
    monkeypatch.setattr(torch, "Generator", ShiftedGenerator)
    monkeypatch.setattr(random, "seed", seed_python)
