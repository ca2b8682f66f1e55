"""Trainings continue as before without any one private name; a feature that needs it is refused in one message."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from equipoise.interop.adapters import ADAPTERS, FEATURES

ROOT = Path(__file__).parents[2]
NAMES = list(dict.fromkeys(name for adapter in ADAPTERS for name in adapter.names))
PARTS = 4


def results_without(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the results of the program, by the name that was missing."""
    command = [sys.executable, "-m", "tests.interop.without_a_name", "", *names]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(names) + 1, ended.stderr
    return {line["name"]: line for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_training_needs_none_of_them(part: int) -> None:
    results = results_without(NAMES[part::PARTS])
    undisturbed = results.pop("")["weights"]
    for name, result in results.items():
        assert "error" not in result, f"{name}: {result.get('error')}"
        for strategy, weights in undisturbed.items():
            assert result["weights"][strategy] == pytest.approx(weights, rel=0, abs=1e-12), f"{strategy} without {name}"
        for feature, message in result["refusals"].items():
            assert message.startswith(f"{FEATURES[feature]} does not work with "), (
                f"{feature} without {name}: {message}"
            )
            assert name in message
            assert "pip install '" in message


def test_the_names_exist_here() -> None:
    from equipoise.interop.adapters import missing_names

    assert {feature: missing_names(feature, with_fallback=True) for feature in FEATURES} == {
        feature: [] for feature in FEATURES
    }
