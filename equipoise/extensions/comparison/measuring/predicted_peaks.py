"""The predicted peaks of all strategies, in a process of their own, for the column beside the measured ones."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.app.build import build
from equipoise.errors import ConfigurationError
from equipoise.extensions.comparison.bounded.process import run_in_process
from equipoise.extensions.comparison.candidates.candidate import Attempt, batch_size_of
from equipoise.extensions.planning.command.configured_step import first_batch, predict_configured, settings_of
from equipoise.extensions.planning.comparison import plan_strategies
from equipoise.extensions.planning.description.devices import describe_devices
from equipoise.extensions.planning.prediction import MemoryPrediction
from equipoise.memory.profile.places import names_of_devices

__all__ = ["predict_peaks", "trace"]


def predict_peaks(
    values: Mapping[str, Any], attempts: Sequence[Attempt], paths: Sequence[str], folder: Path, timeout: float
) -> dict[str, Any]:
    """Return the predicted peaks of a step.

    Args:
        values: The configuration.
        attempts: The configurations with a strategy.
        paths: Folders from which the process imports the user's modules.
        folder: A new folder for its files.
        timeout: Seconds after which the process is ended.

    Returns:
        Under "peaks", by the label of a strategy, the bytes of each device by name, without strategies that cannot be
        predicted; or under "reason" why there are none.
    """
    plain = []
    for attempt in attempts:
        # The configured size is that of all devices together.
        size = batch_size_of(attempt.values)
        plain.append(
            {
                "label": attempt.candidate.label,
                "strategy": attempt.values["strategy"],
                "devices": attempt.devices,
                "batch_size": size,
            }
        )
    request = {"values": values, "attempts": plain, "paths": list(paths)}
    return run_in_process(trace, request, folder, timeout)


def trace(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Trace the configured step, and return the predicted peaks under "peaks".

    Args:
        request: The configuration, and under "attempts" the strategies with their devices.
        folder: Folder for files, of which a trace writes none.
    """
    torch.set_num_threads(1)
    # 1. The step, traced once.
    values = request["values"]
    attempts = request["attempts"]
    devices = describe_devices(attempts[-1]["devices"])
    example = first_batch(values)
    settings = settings_of(values["trainer"], devices)
    prediction, module = predict_configured(values, example, settings)

    # 2. The peaks under each strategy.
    peaks = {}
    for attempt in attempts:
        of_strategy = _peaks(attempt, prediction, module)
        if of_strategy:
            peaks[attempt["label"]] = of_strategy
    return {"peaks": peaks}


def _peaks(attempt: Mapping[str, Any], prediction: MemoryPrediction, module: nn.Module) -> dict[str, int]:
    """Return the peak of each device by name; empty if they cannot be predicted."""
    try:
        strategy = build(attempt["strategy"], "strategy")
    except ConfigurationError:
        # Its own trial says so.
        return {}
    devices = describe_devices(attempt["devices"])
    (plan,) = plan_strategies(prediction, module, [strategy], devices, attempt["batch_size"])
    names = names_of_devices(attempt["devices"])
    return {name: device.peak.nbytes for name, device in zip(names, plan.devices, strict=False)}
