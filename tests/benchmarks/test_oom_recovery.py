"""A sample of the campaign of injected errors, and that it notices what is wrong."""

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.benchmarks import Modules, Scripts

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quick_collections")]


@pytest.fixture
def scripts_of_it(scripts: Scripts) -> Modules:
    """The benchmark's scripts, by name."""
    return scripts("oom_recovery", "cases", "main")


@pytest.mark.thorough
def test_a_sample(scripts_of_it: Modules, capsys: pytest.CaptureFixture[str]) -> None:
    """Drawn anew each time, on one device and on several processes; the number of the first case is printed."""
    print("first:", first := random.randrange(10**6))
    code = scripts_of_it["main"].main(["--cases", "6", "--ddp", "4", "--first", str(first)])
    assert code == 0, capsys.readouterr().out


def off(outcome: Any) -> None:
    outcome.weights[0][0] += 1e-9


def one_lost(outcome: Any) -> None:
    outcome.seen.pop(0)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("spoil", [off, one_lost])
def test_what_is_wrong_is_noticed(
    spoil: Callable[[Any], None], scripts_of_it: Modules, capsys: pytest.CaptureFixture[str]
) -> None:
    cases, main = scripts_of_it["cases"], scripts_of_it["main"]
    seed = next(n for n in range(99) if (case := cases.draw(n, ("single_device",))).is_bitwise and not case.dropout)

    def spoiled(case: Any, how: str) -> Any:
        outcome = cases.run(case, how)
        if how == "injected":
            with torch.no_grad():
                spoil(outcome)
        return outcome

    with mock.patch.object(main, "run", spoiled), mock.patch.object(main, "LOCAL", ("single_device",)):
        assert main.main(["--cases", "1", "--ddp", "0", "--first", str(seed)]) == 1
    assert f"Case {seed} failed" in capsys.readouterr().out
