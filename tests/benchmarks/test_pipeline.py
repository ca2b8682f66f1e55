"""The pipeline benchmark runs on something small, its search finds the best, and its verdicts are right."""

from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from equipoise.extensions.pipeline.schedule.simulation import simulate
from tests.support.benchmarks import Scripts

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def benchmark(scripts: Scripts) -> dict[str, ModuleType]:
    """The benchmark's scripts, by name."""
    return scripts("pipeline", "networks", "cuts", "sleeping", "main")


@pytest.mark.slow
def test_the_command(benchmark: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, main = tmp_path / "tables.md", benchmark["main"]
    command = "--steps 1 --rounds 1 --devices 2 --replica-devices 2 --micro-batches 1 2 --small"
    with mock.patch.object(main, "FORWARD", 1e-4), mock.patch.object(main, "BACKWARD", 1e-4):
        assert main.main([*command.split(), "--markdown", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "What measuring and choosing take" in printed
    tables = page.read_text().split("\n\n")[1::2]
    assert [len(table.splitlines()) - 2 for table in tables] == [20, 2, 6, 2, 2]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("beyond", "to_mean", "best_to_mean", "to_best", "gain", "code"),
    [
        (0.07, 1.09, 1.08, 1.01, 1.5, 0),
        (0.09, 1.09, 1.08, 1.01, 1.5, 1),
        (0.07, 1.09, 1.05, 1.03, 1.5, 1),
        (0.07, 1.09, 1.08, 1.01, 1.3, 1),
    ],
)
def test_verdicts(
    beyond: float,
    to_mean: float,
    best_to_mean: float,
    to_best: float,
    gain: float,
    code: int,
    benchmark: dict[str, ModuleType],
) -> None:
    main, cuts, sleeping = benchmark["main"], benchmark["cuts"], benchmark["sleeping"]
    found = cuts.Found(
        stages=2, begins=["x"], to_mean=to_mean, to_best=to_best, best_to_mean=best_to_mean, ran=1.0, choosing=0.0
    )

    def steps(module: Any, strategy: Any, devices: int, micro_batches: int, steps: int) -> Any:
        if strategy.cut_before is None:
            strategy.portable.load_strategy_state({"cut_before": ["net.9"], "calls": ["net_9"]})
            return sleeping.Times(1 / gain, 0.0)
        if strategy.cut_before == ["net.6"]:
            strategy.portable.load_strategy_state({"cut_before": ["net.6"], "calls": ["net_6"]})
        each = strategy.stages_per_device
        stages = devices // strategy.replicas * each
        times = [[one] * stages for one in (main.FORWARD, main.BACKWARD)]
        return sleeping.Times(1.0, simulate(strategy.schedule, *times, micro_batches, each).idle + beyond)

    measured = cuts.Measured(calls=9, seconds=1.0, step=1.0, found=[found])
    with mock.patch.multiple(main, step_seconds=steps, cut_network=mock.Mock(return_value=measured)):
        assert main.main(["--small", "--check"]) == code
        assert main.main(["--small"]) == 0
