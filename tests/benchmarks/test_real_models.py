"""The campaign of real models trains those of torch itself, and its verdicts are right."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.benchmarks import BENCHMARKS, Modules, Scripts

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
def campaign(scripts: Scripts) -> Modules:
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


@pytest.mark.parametrize(
    ("found", "single_precision", "refusal", "is_wrong"),
    [
        ({"deviation": 1e-12, "cut": CUT}, False, "", False),
        ({"deviation": 1e-9, "cut": CUT}, False, "", True),
        ({"deviation": 1e-9, "cut": CUT}, True, "", False),
        ({"refused": "it hands on a cache", "traceback": ""}, False, "a cache", False),
        ({"refused": "it hands on a cache", "traceback": ""}, False, "a graph", True),
        ({"failed": "KeyError: 1", "traceback": "KeyError: 1"}, False, "", True),
    ],
)
def test_verdicts(
    found: dict[str, Any],
    single_precision: bool,
    refusal: str,
    is_wrong: bool,
    campaign: Modules,
) -> None:
    model = campaign["catalogue"].Model("a", "torch", torch.nn.Identity, lambda count, generator: {}, refusal=refusal)
    row = campaign["main"].Row("torch", model, {"engines": {"threads": found}, "single_precision": single_precision})
    row.weigh(["threads"], 120.0)
    assert bool(row.wrong) == is_wrong
    assert len(row.cells()) == len(campaign["main"].COLUMNS)
