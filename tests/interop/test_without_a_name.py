"""Trainings continue as before without any one private name; a feature that needs it is refused in one message."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from equipoise.app.machine.facts.features import all_features
from equipoise.interop.adapters import missing_names

ROOT = Path(__file__).parents[2]
FEATURES = {feature.key: feature for feature in all_features()}
NAMES = list(
    dict.fromkeys(name for feature in FEATURES.values() for adapter in feature.adapters for name in adapter.names)
)
PARTS = 2


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
            assert message.startswith(f"{FEATURES[feature].name} does not work with "), (
                f"{feature} without {name}: {message}"
            )
            assert name in message
            assert "pip install '" in message


def test_the_names_exist_here() -> None:
    assert not [name for feature in FEATURES.values() for name in missing_names(feature, with_fallback=True)]
