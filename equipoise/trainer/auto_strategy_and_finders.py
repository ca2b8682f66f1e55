"""Decisions of extensions before a run: the strategy that "auto" means, and searches that callbacks ask for."""

from collections.abc import Callable
from typing import Any

from equipoise.interop.lightning.callbacks import is_stock_finder
from equipoise.names.extensions import load_extension, names_of_extensions
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.runtime.request import Request

__all__ = ["choose_strategy", "search"]

# Processes on the CPU share the memory of the host.
_KINDS = ("cuda",)


def choose_strategy(trainer: Any, request: Request) -> Strategy:
    """Return the strategy under which a fit runs: that of the trainer, unless an extension knows a better one.

    The choice is between strategies for several devices with memory of their own.

    Args:
        trainer: A trainer with `strategy="auto"`.
        request: The fit.
    """
    present: Strategy = trainer.connected_strategy
    devices = present.processes.devices
    if len(devices) < 2 or any(device.type not in _KINDS for device in devices):
        return present
    for name in names_of_extensions("strategy_choices"):
        present = load_extension("strategy_choices", name)(trainer, request, present)
    return present


def search(trainer: Any, make: Callable[..., Any], request: Request) -> bool:
    """Let the finders among the callbacks search before a run, and verify its first steps if that is asked for.

    Returns:
        True if the run shall follow; False if a method of Lightning's Tuner wanted the search alone.

    Raises:
        ConfigurationError: If a search is not possible.
        StepError: If the first steps are not those of one device.
    """
    wanted = []
    if any(map(is_stock_finder, trainer.callbacks)):
        wanted.append("finders")
    if request.fitting and trainer.constructor_arguments.get("verify", 0):
        wanted.append("verify")
    # A search that wanted no run is the last one.
    return all(load_extension("searches", name)(trainer, make, request) for name in wanted)
