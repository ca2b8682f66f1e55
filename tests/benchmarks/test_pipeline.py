"""The pipeline benchmark runs on something small, its search finds the best, and its verdicts are right."""

import random
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from equipoise.extensions.pipeline.planning.stage_costs import Block
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


def test_the_search_tries_everything(benchmark: dict[str, ModuleType]) -> None:
    print("seed:", seed := random.randrange(10**6))
    draw = random.Random(seed)
    for _ in range(30):
        calls = [Block(name="", forward=draw.random(), may_end=draw.random() < 0.8) for _ in range(draw.randint(5, 12))]
        places = [index + 1 for index, call in enumerate(calls[:-1]) if call.may_end]
        for stages in range(1, min(4, len(places) + 1) + 1):
            expected = min(
                max(
                    sum(call.forward for call in calls[first:end])
                    for first, end in zip([0, *cuts], [*cuts, len(calls)], strict=True)
                )
                for cuts in combinations(places, stages - 1)
            )
            assert benchmark["cuts"].best_slowest(calls, stages) == pytest.approx(expected)


@pytest.mark.thorough
def test_the_networks_are_what_they_should_be(benchmark: dict[str, ModuleType]) -> None:
    networks = benchmark["networks"]
    assert networks.count(networks.PyramidNet()) == pytest.approx(24e6, rel=0.01)
    assert len(networks.Transformer().blocks) == 24
    assert networks.PyramidNet(2, 12)(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    tokens = torch.randint(50, (2, 7))
    model = networks.Transformer(2, 64, 50)
    later = tokens.clone()
    later[:, -1] = 0
    assert torch.allclose(model(tokens)[:, :-1], model(later)[:, :-1], atol=1e-6)  # causal


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("beyond", "to_mean", "best_to_mean", "to_best", "gain", "code"),
    [
        (0.07, 1.09, 1.08, 1.01, 1.5, 0),
        (0.09, 1.09, 1.08, 1.01, 1.5, 1),
        (0.07, 1.15, 1.08, 1.01, 1.5, 1),
        (0.07, 1.15, 1.14, 1.01, 1.5, 0),  # no cut is better
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
