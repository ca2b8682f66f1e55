"""The campaign of real models trains those of torch itself, and its verdicts are right."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from equipoise.extensions.pipeline.planning.stage_costs import Block
from tests.support.benchmarks import BENCHMARKS, Scripts

pytestmark = pytest.mark.filterwarnings("ignore")

MODULES = (
    "catalogue",
    "best_cut",
    "libraries",
    "networks",
    "stage_costs",
    "training",
    "transformers_models",
    "other_models",
    "main",
)
CUT = {"names": ["net.layers.2"], "to_mean": 1.05, "opaque": {"gate": "it asks for values"}}


@pytest.fixture
def campaign(scripts: Scripts) -> dict[str, ModuleType]:
    """The benchmark's scripts, by name."""
    return scripts("real_models", *MODULES)


@pytest.mark.slow
def test_models_of_torch(tmp_path: Path) -> None:
    # A process of its own: the campaign forks, and a fork cannot use the server of worker processes that other tests
    # have started in this one.
    table = tmp_path / "table.md"
    script = BENCHMARKS / "real_models" / "main.py"
    command = [sys.executable, str(script), "--sections", "torch", "--records", str(tmp_path), "--markdown", str(table)]
    for engines in (["--engines", "threads"], ["--reuse"]):
        campaign = subprocess.run([*command, *engines], capture_output=True, text=True, timeout=300, check=False)
        assert campaign.returncode == 0, campaign.stdout + campaign.stderr
    assert "| torch | 3 | 3 | 0 | 0 |" in table.read_text()


def test_an_absent_library_is_skipped(
    campaign: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.md"
    with mock.patch.object(campaign["main"], "absence", lambda library: f"{library} is absent"):
        command = ["--sections", "timm", "--records", str(tmp_path), "--markdown", str(table)]
        assert campaign["main"].main(command) == 0
    assert "timm: skipped, timm is absent" in capsys.readouterr().out
    assert "- timm: skipped, timm is absent" in table.read_text()


@pytest.mark.parametrize(
    ("found", "single_precision", "refusal", "is_wrong"),
    [
        ({"deviation": 1e-12, "cut": CUT}, False, "", False),
        ({"deviation": 1e-9, "cut": CUT}, False, "", True),
        ({"deviation": 1e-9, "cut": CUT}, True, "", False),
        ({"deviation": 1e-4, "cut": CUT}, True, "", True),
        ({"deviation": float("nan"), "cut": CUT}, True, "", True),
        ({"refused": "it hands on a cache", "traceback": ""}, False, "", True),
        ({"refused": "it hands on a cache", "traceback": ""}, False, "a cache", False),
        ({"refused": "it hands on a cache", "traceback": ""}, False, "a graph", True),
        ({"failed": "KeyError: 1", "traceback": "KeyError: 1"}, False, "", True),
        (None, False, "", True),
    ],
)
def test_verdicts(
    found: dict[str, Any] | None,
    single_precision: bool,
    refusal: str,
    is_wrong: bool,
    campaign: dict[str, ModuleType],
) -> None:
    model = campaign["catalogue"].Model("a", "torch", torch.nn.Identity, lambda count, generator: {}, refusal=refusal)
    engines = {} if found is None else {"threads": found}
    row = campaign["main"].Row("torch", model, {"engines": engines, "single_precision": single_precision})
    row.weigh(["threads"], 120.0)
    assert bool(row.wrong) == is_wrong
    assert len(row.cells()) == len(campaign["main"].COLUMNS)


@pytest.mark.parametrize(
    ("to_mean", "best", "is_unbalanced", "is_worse"),
    [(1.15, {}, False, False), (1.2, {}, True, True), (1.4, 1.39, True, False), (1.4, 1.2, True, True)],
)
def test_the_slowest_stage_is_compared_with_the_best_possible(
    to_mean: float, best: Any, is_unbalanced: bool, is_worse: bool, campaign: dict[str, ModuleType]
) -> None:
    model = campaign["catalogue"].Model("a", "torch", torch.nn.Identity, lambda count, generator: {})
    cut = {**CUT, "to_mean": to_mean}
    if best:
        cut |= {"best_to_mean": best, "piece": "layers.2", "piece_to_mean": 1.1}
    row = campaign["main"].Row("torch", model, {"engines": {"threads": {"deviation": 0.0, "cut": cut}}})
    row.weigh(["threads"], 120.0)
    assert (bool(row.unbalanced), bool(row.worse), bool(row.wrong)) == (is_unbalanced, is_worse, False)


@pytest.mark.thorough
def test_the_best_cut_and_the_largest_piece(campaign: dict[str, ModuleType]) -> None:
    best_cut = campaign["best_cut"]
    # Between the second call and the third, which take 5 and 2 seconds, no cut is allowed.
    costs = [(1.0, True), (5.0, False), (2.0, True), (1.0, True)]
    calls = [Block(name=str(index), forward=cost, may_end=may) for index, (cost, may) in enumerate(costs)]
    assert best_cut.best_to_mean(calls) == pytest.approx(2 * 8 / 9)
    assert best_cut.largest_piece(calls) == ("1", pytest.approx(2 * 7 / 9))


@pytest.mark.slow
def test_costs_are_measured_beside_the_prediction(campaign: dict[str, ModuleType], tmp_path: Path) -> None:
    model = campaign["main"].SECTIONS["torch"]()[0]
    record = tmp_path / "record.json"
    campaign["training"].judge(model, ["threads"], record)
    row = campaign["main"].Row("torch", model, campaign["main"].read(record))
    costs = row.record["engines"]["threads"]["costs"]
    assert costs.keys() == {"memory", "to_mean", "time"}
    assert 0.5 < costs["memory"] < 2
    assert costs["to_mean"] >= 1
    assert f"{costs['memory']:.2f}" in row.cells()
    cut = row.record["engines"]["threads"]["cut"]
    assert 1 <= cut["best_to_mean"] <= cut["to_mean"] <= 1.02 * cut["best_to_mean"]


def test_a_deviation_is_a_share_of_the_way(campaign: dict[str, ModuleType]) -> None:
    layers = [torch.nn.Linear(1, 1) for _ in range(3)]
    for layer, weight in zip(layers, (1.0, 3.0, 3.5), strict=True):
        torch.nn.init.constant_(layer.weight, weight)
        torch.nn.init.zeros_(layer.bias)
    assert campaign["training"].deviation(*layers) == pytest.approx(0.25)
    assert campaign["training"].deviation(layers[0], layers[0], layers[1]) == float("inf")


def test_single_precision_is_noticed(campaign: dict[str, ModuleType]) -> None:
    class Single(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).float().exp().double()

    def batch(count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(count, 2, dtype=torch.float64)}

    class Double(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.ones(1, dtype=torch.float32)

    for kind, is_single in ((Single, True), (Double, False)):
        model = campaign["catalogue"].Model("a", "torch", lambda kind=kind: kind(2, 2), batch)
        assert campaign["training"].begin(model)[1] is is_single


def test_an_unknown_name_is_an_error(campaign: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        campaign["main"].main(["--only", "berd"])
    assert "no model 'berd'" in capsys.readouterr().err


def test_every_name_of_a_section_is_its_own(campaign: dict[str, ModuleType]) -> None:
    counts = {}
    for section, make in campaign["main"].SECTIONS.items():
        names = [model.name for model in make()]
        assert len(names) == len(set(names))
        counts[section] = len(names)
    assert counts["transformers"] >= 40
    assert counts["transformers-tasks"] >= 15
    assert counts["timm"] == 37
    assert counts["torchvision"] == 17
