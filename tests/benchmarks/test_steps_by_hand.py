"""A sample of the programs that take their steps by hand, and that the table notices what is wrong."""

import pytest

from benchmarks.steps_by_hand.main import PROGRAMS, STRATEGIES, cell, on_one_device

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("program", "strategy", "expected"),
    [
        ("ManualBackward", "one device", "equal"),
        ("Surgery", "ddp, native", "equal"),
        ("PenaltyOnGradients", "ddp", "equal"),
        ("ClampedCritic", "fsdp, one unit", "equal"),
        ("RetainedGraph", "fsdp, one unit", "refused: A backward needs weights that an earlier backward"),
        ("PlainBackward", "virtual", "refused: PlainBackward optimises by hand (automatic_optimization=False)"),
    ],
)
def test_cells(program: str, strategy: str, expected: str) -> None:
    assert cell(program, strategy, on_one_device(program)).startswith(expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_program_is_different(strategy: str) -> None:
    cells = {program: cell(program, strategy, on_one_device(program)) for program in PROGRAMS}
    assert {name: text for name, text in cells.items() if not text.startswith(("equal", "refused"))} == {}


def test_a_difference_is_noticed() -> None:
    expected = on_one_device("PlainBackward")
    expected["network.last.bias"] = expected["network.last.bias"] + 1e-9
    assert cell("PlainBackward", "one device", expected).startswith("different: 1.0e-09")
