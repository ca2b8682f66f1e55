"""Reports of Tune about its trials at their end; Ray itself, which takes minutes, is in `test_ray`."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.app.sweeps.results import JobResult
from equipoise.extensions.ray import ray_tuning


def end_with(results: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[JobResult]:
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
    jobs: Any = [None] * len(results)
    of_jobs = [JobResult(number, [], folder) for number in range(len(results))]
    display: Any = SimpleNamespace(end=lambda result: None)
    ray_tuning.run_trials(jobs, of_jobs, display, cpus=1, gpus=0, address=None, folder=folder)
    return of_jobs


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
    assert [result.error for result in end_with(results, tmp_path, monkeypatch)] == errors
