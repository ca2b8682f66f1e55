"""Strategies by the names under which packages offer them."""

from typing import Any

from equipoise.names.extensions import load_extension, names_of_extensions
from equipoise.strategies.strategy import Strategy

__all__ = ["make_strategy", "strategy_names"]

# The kind of entry points; see `names.extensions`.
_KIND = "strategies"


def strategy_names(*, missing: bool = False) -> list[str]:
    """Return the names of all strategies that are installed.

    Args:
        missing: Count those of Equipoise that were removed from this installation, too. Default: False.
    """
    return names_of_extensions(_KIND, missing=missing)


def make_strategy(name: str, **options: Any) -> Strategy:
    """Return a new strategy.

    Args:
        name: Its name, one of `strategy_names`.
        options: The arguments of its constructor.

    Raises:
        ConfigurationError: If its package is broken, or an option is out of range.
    """
    strategy: Strategy = load_extension(_KIND, name)(**options)
    return strategy
