"""The overhead benchmark: all do the same work over the same steps, and the verdict follows from the numbers."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console

from tests.support.benchmarks import Modules, Scripts

pytestmark = pytest.mark.usefixtures("quick_collections")

MODULES = ("workload", "by_hand", "frameworks", "timing", "import_time", "verdict", "main")
LOADS = ("bare", "samples", "logs", "full", "full with epoch values", "accumulation", "evaluation")


@pytest.fixture
def benchmark(scripts: Scripts) -> Modules:
    """The benchmark's scripts, by name."""
    return scripts("overhead", *MODULES)


@pytest.mark.quick_cases(3)
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # of Lightning, Accelerate and Ignite, about loaders, terminals and folders
@pytest.mark.parametrize("load", LOADS)
def test_all_loops_end_with_the_same_weights(load: str, benchmark: Modules) -> None:
    size = benchmark["workload"].Size(steps=9, warm_up=2)
    batches = benchmark["workload"].make_batches(6)
    hand = benchmark["main"].HAND[load if load in benchmark["main"].HAND else "training"]
    expected = hand(benchmark["workload"].TimedBatches(batches, size)).state_dict()
    if load != "evaluation":
        assert not torch.equal(expected["0.weight"], benchmark["workload"].network().state_dict()["0.weight"])

    found = benchmark["frameworks"].frameworks()
    assert {"Equipoise", "Lightning", "Fabric", "Accelerate", "Ignite"} == set(found)
    for name, contestants in found.items():
        if load not in contestants:
            assert name in ("Fabric", "Accelerate", "Ignite")
            continue
        data = benchmark["workload"].TimedBatches(batches, size)
        state = contestants[load](data).state_dict()
        assert data.ended > data.begun, name
        assert list(state) == list(expected), name
        for key, value in expected.items():
            torch.testing.assert_close(
                state[key], value, rtol=0, atol=0, msg=lambda text, name=name, key=key: f"{name}, {key}: {text}"
            )


def test_each_run_is_compared_with_the_hand_written_run_beside_it(benchmark: Modules) -> None:
    """A machine whose speed drifts changes no ratio, and the loops are equally often first.

    Pairs in which it was much slower than at its best are left out.
    """
    timing = benchmark["timing"]
    entries = [
        timing.Entry("training", timing.BY_HAND, "training", lambda data: None),
        timing.Entry("training", "Equipoise", "bare", lambda data: None),
        timing.Entry("training", "Lightning", "bare", lambda data: None),
    ]
    cost = {timing.BY_HAND: 100.0, "Equipoise": 104.0, "Lightning": 400.0}
    done: list[int] = []
    order: list[str] = []

    def slower_in_every_pair(entry: Any, batches: Any, size: Any) -> float:
        order.append(entry.name)
        return cost[entry.name] * (1 + (len(order) - 1) // 2 / 40)

    with mock.patch.object(timing, "_time", slower_in_every_pair):
        size = benchmark["workload"].Size(1, 1)
        rows = timing.measure(entries, [], size=size, rounds=50, seed=0, report=done.append)
    assert done == list(range(1, 51))
    assert [row.name for row in rows] == list(cost)
    assert [row.ratio for row in rows] == pytest.approx([1.0, 1.04, 4.0])
    assert rows[0].rounds == 11
    assert 4 <= rows[1].rounds <= 12
    assert order.count(timing.BY_HAND) == 100
    assert 30 < sum(name == timing.BY_HAND for name in order[::2]) < 70
    assert all(timing.BY_HAND in pair for pair in zip(order[::2], order[1::2], strict=True))


def row(benchmark: Modules, name: str, load: str, over: float) -> Any:
    return benchmark["timing"].Row("training", name, load, 100 + over, over, over, over, 1 + over / 100)


@pytest.mark.parametrize(
    ("load", "over", "imports", "noise", "code"),
    [
        ("bare", 5.1, 1.1, 0.5, 1),
        ("accumulation", 2.5, 1.1, 0.5, 1),
        ("logs", 99.0, 1.1, 0.5, 0),
        ("bare", 0.0, 1.3, 0.5, 1),
        ("bare", 50.0, 1.3, -2.1, 2),
    ],
)
def test_verdict(load: str, over: float, imports: float, noise: float, code: int, benchmark: Modules) -> None:
    rows = [
        row(benchmark, benchmark["timing"].BY_HAND, "training", 0.0),
        row(benchmark, benchmark["timing"].NOISE, "training", noise),
        row(benchmark, "Equipoise", load, over),
        row(benchmark, "Lightning", load, 900.0),
    ]
    times = benchmark["import_time"].ImportTimes(1.0, imports, imports)
    assert benchmark["main"].conclude(Console(quiet=True), rows, times) == code


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_command_prints_a_table_and_writes_the_numbers(
    benchmark: Modules, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "numbers.json", tmp_path / "table.md"
    command = "--rounds 2 --steps 5 --warm-up 1 --import-rounds 0 --loads bare accumulation"
    command += " --frameworks equipoise lightning"
    assert benchmark["main"].main([*command.split(), "--json", str(path), "--markdown", str(page)]) == 0
    printed = capsys.readouterr().out
    content = json.loads(path.read_text())
    named = [(row["group"], row["name"], row["load"]) for row in content["rows"]]
    assert ("training", "Equipoise", "bare") in named
    assert ("accumulation", "Lightning", "accumulation") in named
    assert len(named) == 8
    assert all(row["time"] > 0 for row in content["rows"])
    assert "Equipoise" in printed
    assert len(page.read_text().splitlines()) == 2 + len(named)
    assert "1 thread" in printed
