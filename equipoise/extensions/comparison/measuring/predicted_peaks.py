"""The predicted peaks of all strategies, in a process of their own, for the column beside the measured ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from equipoise.app.build import build
from equipoise.errors import ConfigurationError
from equipoise.extensions.common.planned_devices import describe_devices
from equipoise.extensions.comparison.measuring.candidates import Attempt, batch_size_of
from equipoise.extensions.planning.command.configured_step import batches_of, predict_configured, settings_of
from equipoise.extensions.planning.comparison import plan_strategies
from equipoise.extensions.planning.peaks.memory_prediction import MemoryPrediction
from equipoise.memory.profile.places import names_of_devices

__all__ = ["predict_peaks"]


def predict_peaks(values: Mapping[str, Any], attempts: Sequence[Attempt]) -> dict[str, dict[str, int]]:
    """Trace the configured step, and return the predicted peaks.

    Returns:
        By the label of a strategy, the bytes of each device by name, without strategies that cannot be predicted.
    """
    torch.set_num_threads(1)
    # 1. The step, traced once.
    devices = describe_devices(attempts[-1].devices)
    example, *_ = batches_of(values).batches
    prediction, module = predict_configured(values, example, settings_of(values, devices))

    # 2. The peaks under each strategy.
    peaks = {}
    for attempt in attempts:
        of_strategy = _peaks(attempt, prediction, module)
        if of_strategy:
            peaks[attempt.candidate.label] = of_strategy
    return peaks


def _peaks(attempt: Attempt, prediction: MemoryPrediction, module: nn.Module) -> dict[str, int]:
    """Return the peak of each device by name; empty if they cannot be predicted."""
    try:
        strategy = build(attempt.values["strategy"], "strategy")
    except ConfigurationError:
        # The trial of the strategy reports the error.
        return {}
    devices = describe_devices(attempt.devices)
    (plan,) = plan_strategies(prediction, module, [strategy], devices, batch_size_of(attempt.values))
    names = names_of_devices(attempt.devices)
    return {name: device.peak.nbytes for name, device in zip(names, plan.devices, strict=False)}
