"""Run the jobs of a sweep as trials of Ray Tune, and follow them."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.app.sweeps.jobs import SweepJob
from equipoise.app.sweeps.progress import Progress, reporting_to
from equipoise.app.sweeps.results import JobResult
from equipoise.app.sweeps.tables import SweepDisplay
from equipoise.extensions.ray.ray_cluster import connected
from equipoise.interop.ray import error_of_trial

__all__ = ["run_trials"]

# Keys of reports beside the metrics of a trial.
_INDEX = "trial_index"
_VALUE = "trial_value"
_METRICS = "trial_metrics"
_EPOCH = "trial_epoch"


def _report(progress: Progress) -> None:
    """Report values of the trial in whose process this is called; schedulers of Tune can decide by them as well."""
    import ray.tune

    metrics = dict(progress.metrics)
    ray.tune.report({**metrics, _METRICS: metrics, _EPOCH: progress.epoch})


@dataclass(frozen=True)
class _Trial:
    """Function of each trial: runs the job of its number.

    Attributes:
        jobs: The jobs.
        folder: Working folder of the program.
        path: Python's search path of the program.
    """

    jobs: Sequence[SweepJob]
    folder: str
    path: Sequence[str]

    def __call__(self, config: Mapping[str, Any]) -> None:
        """Run the job where the program is, and report its value."""
        # Tune has chosen a folder of its own.
        sys.path[:0] = [entry for entry in self.path if entry not in sys.path]
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        with reporting_to(_report):
            value = self.jobs[config[_INDEX]].run()
        import ray.tune

        ray.tune.report({_VALUE: value, _METRICS: {}, _EPOCH: None})


def run_trials(
    jobs: Sequence[SweepJob],
    results: Sequence[JobResult],
    display: SweepDisplay,
    *,
    cpus: float,
    gpus: float,
    address: str | None,
    folder: Path,
) -> None:
    """Run jobs in trials of Ray Tune, each in a process of its own; an error of a trial does not end the others.

    Args:
        jobs: The jobs.
        results: Their results, which are filled in.
        display: Shows the end of each job.
        cpus: Number of CPUs of each trial.
        gpus: Number of GPUs of each trial.
        address: Address of the cluster; None: see `connected`.
        folder: Folder in which Tune keeps its state.

    Raises:
        KeyboardInterrupt: If the trials were interrupted.
    """
    trial = _Trial(tuple(jobs), os.getcwd(), list(sys.path))
    with connected(address, cpus, gpus) as ray:
        # 1. A trial for each number, as many at a time as there are resources.
        followed = _follower(ray, results, display)
        tuner = ray.tune.Tuner(
            ray.tune.with_resources(_as_function(trial), {"CPU": cpus, "GPU": gpus}),
            param_space={_INDEX: ray.tune.grid_search(list(range(len(jobs))))},
            run_config=ray.tune.RunConfig(
                name="ray",
                storage_path=str(folder.absolute()),
                callbacks=[followed],
                verbose=0,
            ),
        )
        grid = tuner.fit()
        # 2. Errors of which there was no sign before the end.
        for index, result in enumerate(grid):
            # One that was interrupted before its first report has no configuration. They are in the order of numbers.
            followed.fail((result.config or {_INDEX: index})[_INDEX], result.error)
    if len(followed.ended) < len(jobs):
        # Tune ends its trials at Ctrl-C and returns.
        raise KeyboardInterrupt


def _as_function(trial: _Trial) -> Callable[[Mapping[str, Any]], None]:
    """Return a function, as Tune takes no other objects that can be called."""

    def run_trial(config: Mapping[str, Any]) -> None:
        trial(config)

    return run_trial


def _follower(ray: Any, results: Sequence[JobResult], display: SweepDisplay) -> Any:
    """Return a callback of Tune that fills in results. Its base class exists once Ray is imported."""

    class Follower(ray.tune.Callback):  # type: ignore[misc]
        """Fills in the results of jobs as their trials continue."""

        def __init__(self, results: Sequence[JobResult], display: SweepDisplay) -> None:
            # Variables of the function around would be saved with the class.
            self.results = results
            self.display = display
            self.ended: set[int] = set()

        def __getstate__(self) -> dict[str, Any]:
            """Return nothing. Tune saves its callbacks, and a saved one follows no trial."""
            return {}

        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            """Note the start of a trial."""
            self.results[trial.config[_INDEX]].begin("ray")

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            """Note values, and the end of the job."""
            index = trial.config[_INDEX]
            if _VALUE in result:
                self.ended.add(index)
                self.results[index].finish(result[_VALUE])
                self.display.end(self.results[index])
            elif _METRICS in result:
                self.results[index].note(Progress(result[_METRICS], result[_EPOCH]))

        def on_step_end(self, iteration: int, trials: Any, **info: Any) -> None:
            """Note errors. When Tune says that a trial failed, its error is not there yet."""
            for trial in trials:
                if trial.status == trial.ERROR:
                    self.fail(trial.config[_INDEX], error_of_trial(trial))

        def fail(self, index: int, error: Any) -> None:
            """Note the error of a trial, once."""
            if error is None or index in self.ended:
                return
            self.ended.add(index)
            # Ray's error of a task has that of the function as its cause.
            self.results[index].fail(getattr(error, "cause", None) or error)
            self.display.end(self.results[index])

    return Follower(results, display)
