"""Run a function in the workers of a Ray Train run."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.callbacks.callback import Callback
from equipoise.extensions.ray.ray import RayReport, last_checkpoint
from equipoise.extensions.ray.ray_cluster import connected
from equipoise.interop.ray import error_of_worker

__all__ = ["WorkerResources", "train_in_workers"]

# Runs checked values with further callbacks, and returns the last metrics.
RunValues = Callable[[Mapping[str, Any], Sequence[Callback]], dict[str, float]]


@dataclass(frozen=True)
class WorkerResources:
    """Resources of a run on a cluster.

    Attributes:
        workers: Number of workers.
        cpus: Number of CPUs of each worker.
        gpus: Number of GPUs of each worker.
    """

    workers: int
    cpus: float
    gpus: float

    @property
    def of_worker(self) -> dict[str, float]:
        """The resources of a worker, by Ray's names."""
        return {"CPU": self.cpus, "GPU": self.gpus}


@dataclass(frozen=True)
class _Work:
    """Function of each worker.

    Attributes:
        run_values: Runs the configuration.
        values: The configuration in plain values.
        every_n_train_steps: Number of steps between reports; None for reports of epochs alone.
        folder: Working folder of the program.
        path: Python's search path of the program.
    """

    run_values: RunValues
    values: Mapping[str, Any]
    every_n_train_steps: int | None
    folder: str
    path: Sequence[str]

    def __call__(self) -> None:
        """Run the configuration in this worker, and report its last metrics."""
        # 1. Be where the program is: Ray has chosen a folder of its own.
        sys.path[:0] = [entry for entry in self.path if entry not in sys.path]
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        # 2. Continue from the last report after a restart, whatever the first attempt began with.
        values = dict(self.values)
        callbacks: list[Callback] = []
        if values["stage"] == "fit":
            callbacks.append(RayReport(self.every_n_train_steps))
            if last_checkpoint() is not None:
                values["ckpt_path"] = "last"
        metrics = self.run_values(values, callbacks)
        # 3. Metrics of a test, or of an evaluation, are those of the last report.
        import ray.train

        ray.train.report(metrics)


def train_in_workers(
    run_values: RunValues,
    values: Mapping[str, Any],
    resources: WorkerResources,
    *,
    address: str | None,
    max_failures: int,
    every_n_train_steps: int | None,
) -> dict[str, float]:
    """Run a configuration in the workers of a Ray Train run, which train one model together.

    Args:
        run_values: Runs the configuration; every worker can import it.
        values: The configuration in plain values. All workers can reach its folder.
        resources: The workers and their resources.
        address: Address of the cluster; None: see `connected`.
        max_failures: Number of failures after which workers are started anew; -1: no limit.
        every_n_train_steps: Number of optimiser steps from one checkpoint to the next; None: one for each epoch.

    Returns:
        The last metrics of the run.

    Raises:
        Exception: The first error of a worker, if the workers are not started anew.
    """
    # 1. What each worker runs, and where Ray keeps its files.
    work = _Work(run_values, values, every_n_train_steps, os.getcwd(), list(sys.path))
    storage = Path(values["output_dir"]).absolute()
    cpus = resources.workers * resources.cpus
    gpus = resources.workers * resources.gpus
    with connected(address, cpus, gpus) as ray:
        # 2. A restarted worker needs the last checkpoint; one before it is kept for the time of a report.
        trainer = ray.train.torch.TorchTrainer(
            work,
            scaling_config=ray.train.ScalingConfig(
                num_workers=resources.workers,
                use_gpu=resources.gpus > 0,
                resources_per_worker=resources.of_worker,
            ),
            run_config=ray.train.RunConfig(
                name="ray",
                storage_path=str(storage),
                failure_config=ray.train.FailureConfig(max_failures=max_failures),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            ),
        )
        # 3. The error of a worker says more than Ray's about the group of all workers.
        try:
            with _own_handler_of_interrupts():
                result = trainer.fit()
        except ray.train.WorkerGroupError as error:
            raise _first_cause(error) from error
        except SystemExit as error:
            # Ray ends the workers at Ctrl-C, and then leaves the program.
            raise KeyboardInterrupt from error
    return {name: value for name, value in (result.metrics or {}).items() if isinstance(value, float)}


@contextmanager
def _own_handler_of_interrupts() -> Iterator[None]:
    """Restore this program's handler of Ctrl-C at the end of a block; Ray replaces it and leaves its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        # None: another language has set it, and it cannot be restored.
        if handler is not None:
            signal.signal(signal.SIGINT, handler)


def _first_cause(error: Any) -> BaseException:
    """Return the error of the worker of lowest rank; others may follow from it."""
    failures = error.worker_failures
    if not failures:
        return error  # type: ignore[no-any-return]
    return error_of_worker(failures[min(failures)])
