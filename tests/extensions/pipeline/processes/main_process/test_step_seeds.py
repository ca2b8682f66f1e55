"""Seeds of steps: different for each, the same after a resumption."""

from collections.abc import Iterator

import pytest
import torch

from equipoise.extensions.pipeline.processes.main_process.step_seeds import StepSeeds


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


def next_training_seed(seeds: StepSeeds) -> int:
    seeds.begin_step()
    return seeds.training_seed()


def test_seeds_have_48_bits_and_differ() -> None:
    seeds = StepSeeds()
    values = [next_training_seed(seeds) for _ in range(3)]
    values += [seeds.next_evaluation_seed() for _ in range(3)]
    assert len(set(values)) == 6
    assert all(0 <= value < 1 << 48 for value in values)
    torch.manual_seed(4)
    assert next_training_seed(StepSeeds()) != values[0]


def test_replicas_draw_other_numbers() -> None:
    torch.manual_seed(4)
    first = next_training_seed(StepSeeds())
    assert first == next_training_seed(StepSeeds(replica=0))
    assert first != next_training_seed(StepSeeds(replica=1))
