"""A sample of the programs that take their steps by hand, and that the table notices what is wrong."""

from functools import cache, partial

import pytest

from benchmarks.steps_by_hand.main import PROGRAMS, STRATEGIES, Numbers, cell, on_one_device
from tests.extensions.fsdp.programs import in_processes

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


@cache
def all_on_one_device() -> dict[str, Numbers]:
    return {program: on_one_device(program) for program in PROGRAMS}


def check(strategies: list[str], expected: dict[str, Numbers]) -> None:
    """See that no program trains other numbers in silence; called in each process, where several are launched."""
    for strategy in strategies:
        cells = {program: cell(program, strategy, expected[program]) for program in PROGRAMS}
        wrong = {name: text for name, text in cells.items() if not text.startswith(("equal", "refused"))}
        assert wrong == {}, f"{strategy}: {wrong}"


@pytest.mark.slow
@pytest.mark.parametrize("launched", [True, False])
def test_no_program_is_different(launched: bool) -> None:
    strategies = [name for name in STRATEGIES if name.startswith(("ddp", "fsdp")) == launched]
    run = partial(check, strategies, all_on_one_device())
    if launched:
        in_processes(2, run)
    else:
        run()


def test_a_difference_is_noticed() -> None:
    expected = on_one_device("PlainBackward")
    expected["network.last.bias"] = expected["network.last.bias"] + 1e-9
    assert cell("PlainBackward", "one device", expected).startswith("different: 1.0e-09")
