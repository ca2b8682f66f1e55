"""A sample of the killed runs with virtual devices, and that the campaign notices what is wrong."""

from itertools import pairwise

import pytest
import torch

from benchmarks.virtual_devices.kills import plan
from benchmarks.virtual_devices.main import differences
from tests.support.benchmarks import BENCHMARKS
from tests.support.programs import Program

pytestmark = pytest.mark.filterwarnings("ignore")

# The campaign forks its programs, which autograd refuses once it has threads; so its process has run no backward.
CAMPAIGN = """
import sys

sys.path.insert(0, sys.argv.pop(1))
from benchmarks.virtual_devices import kills

{change}
sys.exit(kills.main())
"""
SPOILED = """
resumed = kills.killed

def spoiled(*arguments):
    state = resumed(*arguments)
    state["best"] = state["best"].nextafter(state["best"] + 1)
    return state

kills.killed = spoiled
"""


def campaign(*arguments: str, change: str = "") -> tuple[int | None, str]:
    """Return the exit code of a campaign, and all that it wrote."""
    with Program(CAMPAIGN.format(change=change), str(BENCHMARKS.parent), *arguments) as program:
        written, complaints = program.finish()
        return program.returncode, written + complaints


def test_another_number_of_devices_after_each_kill() -> None:
    for seed in range(50):
        devices = plan(seed).devices
        assert len(devices) >= 3
        assert all(one != other for one, other in pairwise(devices))


def test_a_single_bit_is_noticed() -> None:
    state = {"weight": torch.ones(3), "best": torch.tensor(0.0)}
    assert not differences(dict(state), state)
    assert differences({**state, "weight": torch.ones(3).nextafter(torch.zeros(3))}, state) == ["weight"]
    assert differences({"weight": state["weight"]}, state) == ["best"]


@pytest.mark.slow
def test_killed_runs() -> None:
    code, written = campaign("--first", "1", "--kills", "1")
    assert code == 0, written
    assert "equal to the bit, 2 kills so far" in written


@pytest.mark.slow
def test_a_difference_ends_the_campaign_with_an_error() -> None:
    code, written = campaign("--first", "1", "--kills", "1", change=SPOILED)
    assert code == 1, written
    assert "best" in written
