"""Reports of Tune about its trials at their end; Ray itself, which takes minutes, is in `test_ray`."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.extensions.ray import ray_tuning


class Events:
    """Notes the errors of trials."""

    def __init__(self) -> None:
        self.errors: dict[int, BaseException] = {}

    def on_error(self, index: int, error: BaseException) -> None:
        self.errors[index] = error


def end_with(results: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Events:
    """Run trials of which Tune returns these results without any event before."""
    tuner = SimpleNamespace(fit=lambda: results)
    tune = SimpleNamespace(
        Callback=object,
        Tuner=lambda *arguments, **options: tuner,
        RunConfig=dict,
        grid_search=list,
        with_resources=lambda function, resources: function,
    )
    monkeypatch.setattr(ray_tuning, "connected", lambda *arguments: nullcontext(SimpleNamespace(tune=tune)))
    events: Any = Events()
    ray_tuning.run_trials(lambda index: None, len(results), events, cpus=1, gpus=0, address=None, folder=folder)
    return events


def test_trials_that_were_interrupted_before_their_first_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [SimpleNamespace(config={"trial_index": 0}, error=None), SimpleNamespace(config=None, error=None)]
    with pytest.raises(KeyboardInterrupt):
        end_with(results, tmp_path, monkeypatch)


def test_trials_that_failed_before_their_first_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [RuntimeError("first"), RuntimeError("second")]
    results = [
        SimpleNamespace(config=None, error=errors[0]),
        SimpleNamespace(config={"trial_index": 1}, error=errors[1]),
    ]
    assert end_with(results, tmp_path, monkeypatch).errors == dict(enumerate(errors))
