"""A sample of the killed runs with virtual devices, and that a difference is noticed."""

import pytest
import torch

from benchmarks.virtual_devices.main import differences
from tests.support.benchmarks import BENCHMARKS
from tests.support.programs import Program

pytestmark = pytest.mark.filterwarnings("ignore")

# The campaign forks its programs, which autograd refuses once it has threads; so its process has run no backward.
CAMPAIGN = """
import sys

sys.path.insert(0, sys.argv.pop(1))
from benchmarks.virtual_devices import kills

sys.exit(kills.main())
"""


def test_a_single_bit_is_noticed() -> None:
    state = {"weight": torch.ones(3), "best": torch.tensor(0.0)}
    assert not differences(dict(state), state)
    assert differences({**state, "weight": torch.ones(3).nextafter(torch.zeros(3))}, state) == ["weight"]
    assert differences({"weight": state["weight"]}, state) == ["best"]


@pytest.mark.slow
def test_killed_runs() -> None:
    with Program(CAMPAIGN, str(BENCHMARKS.parent), "--first", "1", "--kills", "1") as program:
        written, complaints = program.finish()
        assert program.returncode == 0, written + complaints
    assert "equal to the bit, 2 kills so far" in written
