"""One trial: a few steps under a strategy, in the process of the trial."""

import json
import math
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from equipoise.app.build import build_trainer
from equipoise.errors import ConfigurationError
from equipoise.extensions.common.bench import build_data_and_module, limit_to_steps
from equipoise.extensions.comparison.bench.probe import DeviceProbe, parameters_of
from equipoise.extensions.comparison.measuring.candidates import MOST_SETTLING_STEPS, Attempt
from equipoise.extensions.comparison.measuring.order import read_as_processes
from equipoise.memory.out_of_memory import is_out_of_memory

__all__ = ["measure"]

# A step may count several times, once for each of its optimisers.
_FAR_MORE = 100


def measure(attempt: Attempt, steps: int, weights: Path | None, folder: Path) -> dict[str, Any]:
    """Build the objects, train, and return the measurements.

    Args:
        attempt: The configuration with a strategy.
        steps: Number of steps whose time is measured.
        weights: File with the weights of one device, which the trial on one device writes; None if weights are not
            compared.
        folder: Folder for files of the trial.
    """
    # 1. The objects.
    values = attempt.values
    data, module = build_data_and_module(values)
    # The memory of one step is measured, the time of some, and of another the time in which devices wait.
    measured_steps = 2 + steps
    compared_step = 1 + measured_steps
    # The probe ends the training. The bound, on which learning rates may depend, is the same under each strategy.
    limit_to_steps(values, _FAR_MORE * (MOST_SETTLING_STEPS + measured_steps), folder)
    trainer = build_trainer(values)
    if trainer.world_size == 1:
        read_as_processes(data or module)
    probe = DeviceProbe(
        folder,
        attempt.devices,
        root=attempt.root,
        home=attempt.home,
        settling_steps=attempt.settling_steps,
        timed_steps=steps,
        compared_step=compared_step,
    )
    trainer.callbacks.append(probe)

    # 2. The steps.
    try:
        trainer.fit(module, datamodule=data)
    except Exception as error:
        if is_out_of_memory(error):
            return {"reason": f"a device ran out of memory: {str(error).partition(chr(10))[0]}", "is_memory": True}
        raise
    result = _merged(folder, trainer.world_size)

    # 3. The weights. Those of several processes are whole after the run.
    if weights is None:
        return result
    own_weights = probe.weights or parameters_of(module)
    if attempt.candidate.name == "single_device":
        torch.save(own_weights, weights)
    elif weights.is_file():
        result["distance"] = _distance(own_weights, torch.load(weights, weights_only=True))
    return result


def _merged(folder: Path, world_size: int) -> dict[str, Any]:
    """Return the measurements of all processes together."""
    peaks: dict[str, int] = {}
    seconds = 0.0
    samples: float | None = 0.0
    waiting = []
    # 1. Those of each process. A step lasts as long as in the slowest one.
    for rank in range(world_size):
        path = folder / f"rank-{rank}.json"
        if not path.is_file():
            raise ConfigurationError(f"Process {rank} has measured nothing.")
        measured = json.loads(path.read_text(encoding="utf-8"))
        peaks |= measured["peaks"]
        if not measured["seconds"]:
            raise ConfigurationError("The training ended before the steps were measured: there are too few batches.")
        seconds = max(seconds, median(measured["seconds"]))
        if samples is None or None in measured["samples"]:
            samples = None
        else:
            samples += median(measured["samples"])
        if measured["idle"] is not None:
            waiting.append(measured["idle"])
    # 2. The figures of all together.
    result: dict[str, Any] = {"peaks": peaks, "seconds": seconds, "samples_per_second": None, "idle": None}
    if samples:
        result["samples_per_second"] = samples / seconds
    if waiting:
        result["idle"] = mean(waiting)
    return result


def _distance(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all weights, relative to the norm of the reference."""
    difference = 0.0
    norm = 0.0
    for name, expected in reference.items():
        difference += float((weights[name].double() - expected.double()).square().sum())
        norm += float(expected.double().square().sum())
    # All weights may be zero.
    if not norm:
        return math.sqrt(difference)
    return math.sqrt(difference / norm)
