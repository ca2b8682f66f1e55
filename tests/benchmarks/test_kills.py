"""A sample of the campaign of killed runs, and that it notices what is wrong."""

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.benchmarks import BENCHMARKS, Scripts
from tests.support.programs import Program

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def scripts_of_it(scripts: Scripts) -> dict[str, ModuleType]:
    """The benchmark's scripts, by name."""
    return scripts("kills", "programs", "attempts", "main")


# The campaign forks its programs, which autograd refuses once it has threads; so its process has run no backward.
CAMPAIGN = """
import sys

sys.path.insert(0, sys.argv[1])
import main

{change}
sys.exit(main.main(sys.argv[2:]))
"""


def campaign(*arguments: str, change: str = "") -> tuple[int | None, str]:
    """Return the exit code of a campaign, and all that it wrote."""
    with Program(CAMPAIGN.format(change=change), str(BENCHMARKS / "kills"), *arguments) as program:
        written, complaints = program.finish()
        return program.returncode, written + complaints


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["single", "persistent"])
def test_a_sample(mode: str) -> None:
    """Drawn anew each time; the number of the first program is printed."""
    print("first:", first := random.randrange(10**6))
    code, written = campaign("--modes", mode, "--cases", "2", "--first", str(first))
    assert code == 0, written


def weights_off(outcome: Any) -> None:
    outcome.values["weights"]["net.0.weight"][0, 0] += 1e-6


def a_sample_lost(outcome: Any) -> None:
    outcome.seen.pop((0, 0, 0))


def samples_exchanged(outcome: Any) -> None:
    outcome.seen[0, 0, 0][0].reverse()


def a_row_twice(outcome: Any) -> None:
    outcome.rows += outcome.rows.splitlines()[-1] + "\n"


def another_best(outcome: Any) -> None:
    outcome.values["best"][0][0] += "0"


def optimizer_off(outcome: Any) -> None:
    outcome.values["optimizer"]["state"][0]["exp_avg"] *= 1.001


@pytest.mark.parametrize(
    "spoil", [weights_off, a_sample_lost, samples_exchanged, a_row_twice, another_best, optimizer_off]
)
def test_what_is_wrong_is_noticed(spoil: Callable[[Any], None], scripts_of_it: dict[str, ModuleType]) -> None:
    def outcome() -> Any:
        weights = {"net.0.weight": torch.ones(2, 2)}
        optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}
        values = {"weights": weights, "optimizer": optimizer, "best": [["a", 1.0, 2, {}]], "metrics": {"x": 1.0}}
        seen = {(0, 0, 0): [[1, 2]], (0, 0, 1): [[3, 4]]}
        return scripts_of_it["attempts"].Outcome(values, seen, "a,b\n1,2\n")

    compare = scripts_of_it["main"].compare
    compare(outcome(), outcome())
    spoiled = outcome()
    spoil(spoiled)
    with pytest.raises(AssertionError):
        compare(outcome(), spoiled)


SPOILED = """
resumed = main.killed_and_resumed

def spoiled(*arguments):
    outcome = resumed(*arguments)
    outcome.values["weights"]["net.0.weight"][0, 0] += 1e-6
    return outcome

main.killed_and_resumed = spoiled
"""


@pytest.mark.thorough
def test_a_program_that_differs_ends_the_campaign_with_an_error() -> None:
    code, written = campaign("--modes", "single", "--cases", "1", change=SPOILED)
    assert code == 1, written
    assert "single 0 failed: /weights/net.0.weight" in written
