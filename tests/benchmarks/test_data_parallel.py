"""The data-parallel benchmark runs, and what it compares with is right."""

from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from tests.support.benchmarks import Scripts


@pytest.fixture
def benchmark(scripts: Scripts) -> ModuleType:
    """The benchmark's script."""
    return scripts("data_parallel", "main")["main"]


def test_a_replica_built_anew_computes_the_same(benchmark: ModuleType) -> None:
    module = benchmark.Deep(blocks=3)
    replica = benchmark.rebuilt(module, torch.device("cpu"))
    features = torch.randn(4, 32)
    assert torch.equal(replica(features), module(features))
    replica(features).sum().backward()  # as under nn.DataParallel, gradients reach the module's parameters
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_the_best_shares_of_known_devices(benchmark: ModuleType) -> None:
    pair = benchmark.Unequal((1.0, 1.0), (0.1, 0.3), 40)
    assert pair.best() == 30
    assert pair.seconds(30) == pytest.approx(0.004)
    assert pair.seconds(40) == pytest.approx(0.005)  # the other device is left out, its base included


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_the_command(benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(benchmark, "PAIRS", benchmark.PAIRS[:1]):
        tables = tmp_path / "tables.md"
        code = benchmark.main(["--rounds", "1", "--steps", "8", "--replications", "2", "--markdown", str(tables)])
    assert code == 0
    assert "A replica of 218 modules" in capsys.readouterr().out
    assert tables.read_text().count("\n| --- ") == 3
