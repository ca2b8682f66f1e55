"""At least 40 configurations compute on two simulated CUDA devices what they compute on the CPU.

Compared are the module's state, the states of the optimisers and the logged values of each step and epoch. In float64
they agree within 1e-12, as the promise of exact gradients says; in lower precisions as far as those go, since CUDA and
the CPU keep different operations in float32 under autocast, and dtypes round where sums are ordered otherwise.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from equipoise import BalancedDataParallelStrategy, DataParallelStrategy, PipelineStrategy, Strategy
from tests.simulated.configurations.fitting import (
    Configuration,
    Deep,
    LoggedConvolution,
    LoggedFrozen,
    LoggedManual,
    LoggedMasked,
    LoggedRecurrent,
    LoggedTied,
    Plain,
    assert_same_result,
    fit_on_devices,
    fit_on_the_host,
)

FEWEST = 40

DEVICES = {
    "two devices": ("cuda:0", "cuda:1"),
    "reversed": ("cuda:1", "cuda:0"),
    "one device twice": ("cuda:1", "cuda:1"),
}

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "interleaved_1f1b": {"stages_per_device": 2},
    "looped_bfs": {"stages_per_device": 2},
    "interleaved_zero_bubble": {"stages_per_device": 2},
}


def balanced() -> Strategy:
    return BalancedDataParallelStrategy(shares=[3, 1])


def pipeline() -> Strategy:
    return PipelineStrategy(micro_batches=3)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "dp": DataParallelStrategy,
    "dp forward": lambda: DataParallelStrategy(parallelize="forward"),
    "balanced": balanced,
    "balanced forward": lambda: BalancedDataParallelStrategy(shares=[1, 2], parallelize="forward"),
    "balanced auto": lambda: BalancedDataParallelStrategy(shares="auto"),
    "pipeline": pipeline,
}

# Two epochs of five batches: the last window of each is ragged.
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping by norm": {"gradient_clip_val": 0.05},
    "accumulation and clipping by value": {
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
}

# Differences relative to the size of a tensor: a few of the last of 24 bits (float32), 11 (float16) or 8 (bfloat16).
# CUDA and the CPU round at different places, and ten steps with momentum make more of it.
TOLERANCES = {"32-true": 2e-6, "bf16-mixed": 5e-2, "16-mixed": 5e-3, "bf16-true": 1e-1}

MODULES = [LoggedRecurrent, LoggedConvolution, LoggedMasked, LoggedTied]


def of_strategies() -> Iterator[Configuration]:
    """Yield all strategies in float64, on each arrangement of two devices."""
    for device in ("cuda:0", "cuda:1"):
        yield Configuration(f"single_device on {device}", lambda: "single_device", (device,))
    for name, strategy in STRATEGIES.items():
        for place, devices in DEVICES.items():
            yield Configuration(f"{name} on {place}", strategy, devices)
    for schedule, options in SCHEDULES.items():
        for place, devices in DEVICES.items():
            yield Configuration(f"pipeline {schedule} on {place}", scheduled(schedule, **options), devices)


def scheduled(schedule: str, **options: Any) -> Callable[[], Strategy]:
    return lambda: PipelineStrategy(micro_batches=4, schedule=schedule, **options)


def of_options() -> Iterator[Configuration]:
    """Yield accumulation and clipping under each strategy."""
    for options_name, options in OPTIONS.items():
        yield Configuration(f"single_device with {options_name}", lambda: "single_device", ("cuda:1",), Deep, options)
        for name in ("dp", "dp forward", "balanced", "pipeline"):
            yield Configuration(f"{name} with {options_name}", STRATEGIES[name], options=options)


def of_modules() -> Iterator[Configuration]:
    """Yield modules of other kinds."""
    for make in MODULES:
        for name in ("dp", "balanced", "pipeline"):
            yield Configuration(f"{name} of {make.__name__}", STRATEGIES[name], make=make)
    # Its step calls no forward, so there is no network to cut.
    for name in ("dp", "balanced"):
        yield Configuration(f"{name} of LoggedFrozen", STRATEGIES[name], make=LoggedFrozen)
    # The step steps the optimisers, so only the forward is computed in parts.
    for name in ("dp forward", "balanced forward"):
        yield Configuration(f"{name} of LoggedManual", STRATEGIES[name], make=LoggedManual)


def of_precisions() -> Iterator[Configuration]:
    """Yield lower precisions under each strategy."""
    for precision, tolerance in TOLERANCES.items():
        options = {"precision": precision}
        one = Configuration(f"single_device in {precision}", lambda: "single_device", ("cuda:1",), Plain, options)
        configurations = [one]
        for name in ("dp", "dp forward", "balanced", "pipeline"):
            several = Configuration(f"{name} in {precision}", STRATEGIES[name], DEVICES["reversed"], Plain, options)
            configurations.append(several)
        for configuration in configurations:
            yield replace(configuration, tolerance=tolerance)


CONFIGURATIONS = [*of_strategies(), *of_options(), *of_modules(), *of_precisions()]


def test_there_are_enough_configurations() -> None:
    names = {configuration.name for configuration in CONFIGURATIONS}
    print(f"{len(names)} configurations")
    assert len(names) == len(CONFIGURATIONS) >= FEWEST


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_devices_compute_what_the_host_computes(configuration: Configuration) -> None:
    expected = fit_on_the_host(configuration)
    actual = fit_on_devices(configuration)
    assert_same_result(expected, actual, configuration.tolerance)
