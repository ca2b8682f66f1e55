"""Run functions as trials of Ray Tune, and follow them."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from equipoise.extensions.ray.ray_cluster import connected
from equipoise.interop.ray import error_of_trial

__all__ = ["TrialEvents", "report_to_tune", "run_trials"]

# Keys of reports beside the metrics of a trial.
_INDEX = "trial_index"
_VALUE = "trial_value"
_METRICS = "trial_metrics"
_EPOCH = "trial_epoch"


class TrialEvents(Protocol):
    """Receives what happens to trials, in the process that has started them."""

    def on_start(self, index: int) -> None:
        """Note that a trial has begun."""

    def on_report(self, index: int, metrics: Mapping[str, float], epoch: int | None) -> None:
        """Note the last values of a trial."""

    def on_end(self, index: int, value: Any) -> None:
        """Note the value that the function of a trial returned."""

    def on_error(self, index: int, error: BaseException) -> None:
        """Note the error of a trial."""


def report_to_tune(metrics: Mapping[str, float], epoch: int | None = None) -> None:
    """Report values of the trial in whose process this is called.

    Args:
        metrics: The values by their names, by which schedulers of Tune can decide as well.
        epoch: Number of finished epochs. Default: None, unknown.
    """
    import ray.tune

    ray.tune.report({**metrics, _METRICS: dict(metrics), _EPOCH: epoch})


@dataclass(frozen=True)
class _Trial:
    """Function of each trial.

    Attributes:
        function: Called with the number of the trial.
        folder: Working folder of the program.
        path: Python's search path of the program.
    """

    function: Callable[[int], Any]
    folder: str
    path: Sequence[str]

    def __call__(self, config: Mapping[str, Any]) -> None:
        """Run the function where the program is, and report its value."""
        # Tune has chosen a folder of its own.
        sys.path[:0] = [entry for entry in self.path if entry not in sys.path]
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        value = self.function(config[_INDEX])
        import ray.tune

        ray.tune.report({_VALUE: value, _METRICS: {}, _EPOCH: None})


def run_trials(
    function: Callable[[int], Any],
    count: int,
    events: TrialEvents,
    *,
    cpus: float,
    gpus: float,
    address: str | None,
    folder: Path,
) -> None:
    """Run a function in several trials of Ray Tune; an error of a trial does not end the others.

    Args:
        function: Called with the number of each trial, from 0, in a process of its own.
        count: Number of trials.
        events: Receives what happens.
        cpus: Number of CPUs of each trial.
        gpus: Number of GPUs of each trial.
        address: Address of the cluster; None: see `connected`.
        folder: Folder in which Tune keeps its state.

    Raises:
        KeyboardInterrupt: If the trials were interrupted.
    """
    trial = _Trial(function, os.getcwd(), list(sys.path))
    with connected(address, cpus, gpus) as ray:
        # 1. A trial for each number, as many at a time as there are resources.
        followed = _follower(ray, events)
        tuner = ray.tune.Tuner(
            ray.tune.with_resources(_as_function(trial), {"CPU": cpus, "GPU": gpus}),
            param_space={_INDEX: ray.tune.grid_search(list(range(count)))},
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
    if len(followed.ended) < count:
        # Tune ends its trials at Ctrl-C and returns.
        raise KeyboardInterrupt


def _as_function(trial: _Trial) -> Callable[[Mapping[str, Any]], None]:
    """Return a function, as Tune takes no other objects that can be called."""

    def run_trial(config: Mapping[str, Any]) -> None:
        trial(config)

    return run_trial


def _follower(ray: Any, events: TrialEvents) -> Any:
    """Return a callback of Tune that passes on what happens. Its base class is there once Ray is imported."""

    class Follower(ray.tune.Callback):  # type: ignore[misc]
        """Passes on what happens to trials."""

        def __init__(self, events: TrialEvents) -> None:
            self.events = events
            self.ended: set[int] = set()

        def __getstate__(self) -> dict[str, Any]:
            """Return nothing. Tune saves its callbacks, and a saved one passes no events on."""
            return {}

        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            """Pass on the start of a trial."""
            self.events.on_start(trial.config[_INDEX])

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            """Pass on values, and the end of the function."""
            index = trial.config[_INDEX]
            if _VALUE in result:
                self.ended.add(index)
                self.events.on_end(index, result[_VALUE])
            elif _METRICS in result:
                self.events.on_report(index, result[_METRICS], result[_EPOCH])

        def on_step_end(self, iteration: int, trials: Any, **info: Any) -> None:
            """Pass on errors. When Tune says that a trial failed, its error is not there yet."""
            for trial in trials:
                if trial.status == trial.ERROR:
                    self.fail(trial.config[_INDEX], error_of_trial(trial))

        def fail(self, index: int, error: Any) -> None:
            """Pass on the error of a trial, once."""
            if error is None or index in self.ended:
                return
            self.ended.add(index)
            # Ray's error of a task has that of the function as its cause.
            self.events.on_error(index, getattr(error, "cause", None) or error)

    return Follower(events)
