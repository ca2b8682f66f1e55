"""Seeds of steps: different for each, the same after a resumption."""

from collections.abc import Iterator

import pytest
import torch

from equipoise.pipeline.processes.main_process.step_seeds import StepSeeds


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


def test_seeds_have_48_bits_and_differ() -> None:
    seeds = StepSeeds()
    values = [seeds.next_training_seed() for _ in range(3)]
    values += [seeds.next_evaluation_seed() for _ in range(3)]
    assert len(set(values)) == 6
    assert all(0 <= value < 1 << 48 for value in values)
    torch.manual_seed(4)
    assert StepSeeds().next_training_seed() != values[0]


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws() -> None:
    uninterrupted = StepSeeds()
    uninterrupted.next_training_seed()
    uninterrupted.next_evaluation_seed()
    resumed = StepSeeds()
    resumed.steps = uninterrupted.steps
    assert resumed.next_training_seed() == uninterrupted.next_training_seed()
