"""The trial of torch.export trains small networks, and its verdicts are right."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Generator, Tensor, nn

from tests.support.benchmarks import Scripts

pytestmark = pytest.mark.filterwarnings("ignore")

MODULES = (
    *("catalogue", "best_cut", "libraries", "networks", "stage_costs", "training", "transformers_models"),
    *("other_models", "main", "torch_export", "torch_export_comparison", "torch_export_halves", "model_export"),
    *("exported", "property_networks", "exported_properties"),
)


@pytest.fixture
def trial(scripts: Scripts) -> dict[str, ModuleType]:
    """The benchmark's scripts, by name."""
    return scripts("real_models", *MODULES)


class Layers(nn.Module):
    """A stack of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Asks(Layers):
    """Asks for a value between its layers, which torch.export refuses, and the recorder too."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.sum() > 1000:
                x = -x
        return x


def batch(count: int, generator: Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 4, dtype=torch.float64, generator=generator)}


def judged(trial: dict[str, ModuleType], make: Callable[[], nn.Module]) -> dict[str, Any]:
    row: dict[str, Any] = {"section": "torch", "model": "a"}
    trial["model_export"].judge(trial["catalogue"].Model("a", "torch", make, batch), lambda **found: row.update(found))
    return row


@pytest.mark.thorough
def test_a_model_that_is_exported(trial: dict[str, ModuleType]) -> None:
    row = judged(trial, Layers)
    assert row["any_size"]
    assert row["outputs"] == [0, 0]
    assert trial["exported"].is_equal(row)
    assert row["cut"] == {"before": "network.layers.2", "passed": 1, "deviation": 0}
    assert row["pipeline"]["followed_by"] == "recording"
    assert trial["exported"].is_equal_by(row, "pipeline")
    assert "stack" not in row


def test_a_model_that_is_refused_trains_by_its_stack(trial: dict[str, ModuleType]) -> None:
    row = judged(trial, Asks)
    assert row["refused"].startswith("GuardOnDataDependentSymNode")
    assert not trial["exported"].is_equal(row)
    assert row["pipeline"]["followed_by"] == row["stack"]["followed_by"] == "stack"
    assert trial["exported"].is_equal_by(row, "stack")
    line = trial["exported"].table([row])
    assert "| a | refused |" in line
    assert "- torch, a, refused: Guard" in line


@pytest.mark.thorough
def test_another_graph_is_noticed(trial: dict[str, ModuleType]) -> None:
    run = trial["torch_export"].Graph.run
    with mock.patch.object(trial["torch_export"].Graph, "run", lambda graph, tensors: 1.001 * run(graph, tensors)):
        row = judged(trial, Layers)
    assert not trial["exported"].is_equal(row)
    assert row["micro_batches_by_both"] > 1e-4


def test_a_second_run_continues(trial: dict[str, ModuleType], tmp_path: Path) -> None:
    exported, records = trial["exported"], tmp_path / "records.jsonl"
    models = [trial["catalogue"].Model(name, "torch", Layers, batch) for name in "ab"]
    ran: list[str] = []

    def run(section: str, model: Any, path: Path, limit: float) -> None:
        ran.append(model.name)
        exported._write(path, section, model, ended=len(ran) > 1)

    with mock.patch.dict(exported.SECTIONS, {"torch": lambda: models}), mock.patch.object(exported, "run", run):
        for _ in range(3):
            exported.main(["--sections", "torch", "--records", str(records)])
    assert ran == ["a", "b", "a"]
    assert all(row["ended"] for row in exported.read(records).values())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dropout", ["equal", "equal", "equal", "equal"]),
        ("a layer in eval mode in every second step", ["differs", "equal", "equal", "equal"]),
        ("an autograd function with a backward of its own", ["differs", "differs", "DiffersFromForward", "equal"]),
        ("`self.log` in the forward", ["differs", "differs", "DiffersFromForward", "equal"]),
        ("`if mask.all()` about an argument", [*["GuardOnDataDependentSymNode"] * 3, "equal"]),
    ],
)
def test_properties(name: str, expected: list[str], trial: dict[str, ModuleType]) -> None:
    (chosen,) = [each for each in trial["property_networks"].PROPERTIES if each.name == name]
    cells = trial["exported_properties"].row(chosen)[1:]
    assert [cell.partition(" ")[0].rstrip(":") for cell in cells] == expected
