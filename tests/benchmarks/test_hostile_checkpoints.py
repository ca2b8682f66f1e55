"""A sample of the damaged and hostile checkpoints of the benchmark: nothing runs, nothing is read as something else."""

import io
import itertools
import random
from pathlib import Path

import pytest
import torch

from tests.support.benchmarks import Modules, Scripts


@pytest.fixture
def benchmark(scripts: Scripts) -> Modules:
    """The benchmark's scripts."""
    return scripts("hostile_checkpoints", "attacks", "main")


@pytest.mark.slow
def test_a_sample_of_each_campaign(benchmark: Modules, tmp_path: Path) -> None:
    attacks, main = benchmark["attacks"], benchmark["main"]
    content, canary, rng = main.checkpoint(), tmp_path / "canary", random.Random(0)
    whole = torch.load(io.BytesIO(content), weights_only=True)
    attributes = set(dir(torch.Tensor))
    damaged = main.read_all(attacks.damages(content, 40, rng), tmp_path, canary, whole=whole)
    pickles = main.read_all(attacks.damaged_pickles(content, 40, rng), tmp_path, canary, whole=None)
    placed = itertools.islice(attacks.positions(content, str(canary), rng), 0, None, 20)
    placed = main.read_all(placed, tmp_path, canary, whole=None)
    replaced = itertools.islice(attacks.replaced_pickles(content, str(canary)), 0, None, 4)
    replaced = main.read_all(replaced, tmp_path, canary, whole=None)
    for counts, wrong in (damaged, pickles, placed, replaced):
        assert not wrong
        assert set(counts) == {"refused", "read as data"}
    assert set(dir(torch.Tensor)) == attributes


def test_values_of_other_types(benchmark: Modules, tmp_path: Path) -> None:
    attacks, main = benchmark["attacks"], benchmark["main"]
    whole = torch.load(io.BytesIO(main.checkpoint()), weights_only=True)
    counts, wrong = main.resume_all(attacks.mutations(whole, 12, random.Random(3)), tmp_path)
    assert not wrong
    assert counts["refused before a step"] > 5
