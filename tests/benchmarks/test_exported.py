"""The trial of torch.export trains small networks, and its verdicts are right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from tests.support.benchmarks import Modules, Scripts

pytestmark = pytest.mark.filterwarnings("ignore")

MODULES = (
    *("catalogue", "best_cut", "libraries", "networks", "stage_costs", "training", "transformers_models"),
    *("other_models", "main", "torch_export", "torch_export_comparison", "torch_export_halves", "model_export"),
    *("exported", "property_networks", "exported_properties"),
)


@pytest.fixture
def trial(scripts: Scripts) -> Modules:
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


def judged(trial: Modules, make: Callable[[], nn.Module]) -> dict[str, Any]:
    row: dict[str, Any] = {"section": "torch", "model": "a"}
    trial["model_export"].judge(trial["catalogue"].Model("a", "torch", make, batch), lambda **found: row.update(found))
    return row


@pytest.mark.thorough
def test_a_model_that_is_exported(trial: Modules) -> None:
    row = judged(trial, Layers)
    assert row["any_size"]
    assert row["outputs"] == [0, 0]
    assert trial["exported"].is_equal(row)
    assert row["cut"] == {"before": "network.layers.2", "passed": 1, "deviation": 0}
    assert row["pipeline"]["followed_by"] == "recording"
    assert trial["exported"].is_equal_by(row, "pipeline")
    assert "stack" not in row


def test_a_model_that_is_refused_trains_by_its_stack(trial: Modules) -> None:
    row = judged(trial, Asks)
    assert row["refused"].startswith("GuardOnDataDependentSymNode")
    assert not trial["exported"].is_equal(row)
    assert row["pipeline"]["followed_by"] == row["stack"]["followed_by"] == "stack"
    assert trial["exported"].is_equal_by(row, "stack")
    line = trial["exported"].table([row])
    assert "| a | refused |" in line
    assert "- torch, a, refused: Guard" in line
