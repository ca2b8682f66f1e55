"""A sample of the campaign of killed runs, and that it notices what is wrong."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.benchmarks import BENCHMARKS, Modules, Scripts
from tests.support.programs import Program

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def scripts_of_it(scripts: Scripts) -> Modules:
    """The benchmark's scripts, by name."""
    return scripts("kills", "programs", "attempts", "main")


# The campaign forks its programs, which autograd refuses once it has threads; so its process has run no backward.
CAMPAIGN = """
import sys

sys.path.insert(0, sys.argv[1])
import main

sys.exit(main.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["single", "persistent"])
def test_a_sample(mode: str) -> None:
    """Drawn anew each time; the number of the first program is printed."""
    print("first:", first := random.randrange(10**6))
    arguments = ("--modes", mode, "--cases", "2", "--first", str(first))
    with Program(CAMPAIGN, str(BENCHMARKS / "kills"), *arguments) as program:
        written, complaints = program.finish()
        assert program.returncode == 0, written + complaints


def weights_off(outcome: Any) -> None:
    outcome.values["weights"]["net.0.weight"][0, 0] += 1e-6


def a_sample_lost(outcome: Any) -> None:
    outcome.seen.pop((0, 0, 0))


def a_row_twice(outcome: Any) -> None:
    outcome.rows += outcome.rows.splitlines()[-1] + "\n"


@pytest.mark.parametrize("spoil", [weights_off, a_sample_lost, a_row_twice])
def test_what_is_wrong_is_noticed(spoil: Callable[[Any], None], scripts_of_it: Modules) -> None:
    def outcome() -> Any:
        weights = {"net.0.weight": torch.ones(2, 2)}
        values = {"weights": weights, "best": [["a", 1.0, 2, {}]]}
        seen = {(0, 0, 0): [[1, 2]], (0, 0, 1): [[3, 4]]}
        return scripts_of_it["attempts"].Outcome(values, seen, "a,b\n1,2\n")

    compare = scripts_of_it["main"].compare
    compare(outcome(), outcome())
    spoiled = outcome()
    spoil(spoiled)
    with pytest.raises(AssertionError):
        compare(outcome(), spoiled)
