"""Options that a strategy of Lightning keeps, most of them under private names."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import signature
from typing import Any

from equipoise.interop.refusal import refusal

__all__ = ["OurWords", "process_options", "read"]


@dataclass
class OurWords:
    """A strategy of Lightning in terms of ours.

    Attributes:
        name: The name of our strategy.
        ours: The class of our strategy, for messages.
        options: Arguments of its constructor.
        trainer: Arguments of the Trainer which Lightning's strategy holds: those of the Trainer by their names, and
            `checkpoint_io` and `environment`, which are plugins.
        refused: Options without a counterpart that change results, each with its value and the way out.
        left_out: Options without a counterpart that change nothing but speed and memory.
    """

    name: str
    ours: str
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def note_arguments(self, arguments: Mapping[str, Any], wrapper: Any, of_speed: Collection[str]) -> None:
        """Note arguments of torch's wrapper that have no counterpart, and are not its defaults.

        Args:
            arguments: The arguments.
            wrapper: The class of the wrapper.
            of_speed: Names of the arguments that change nothing but speed and memory.
        """
        parameters = signature(wrapper).parameters
        for name, value in arguments.items():
            default = None
            if name in parameters:
                default = parameters[name].default
            if value != default:
                notes = self.left_out if name in of_speed else self.refused
                notes.append(f"{name}={value!r}")


def read(strategy: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return attributes of a strategy.

    Args:
        strategy: A strategy of Lightning.
        names: Names of the attributes, by the names under which they are returned.

    Raises:
        ConfigurationError: If it lacks one of them.
    """
    kind = type(strategy).__name__
    values: dict[str, Any] = {}
    missing: list[str] = []
    for ours, theirs in names.items():
        if hasattr(strategy, theirs):
            values[ours] = getattr(strategy, theirs)
        else:
            missing.append(f"{kind}.{theirs}")
    if missing:
        raise refusal(f"Lightning's {kind}", "lightning", missing, f"Take {kind} of equipoise.")
    return values


def process_options(strategy: Any) -> dict[str, Any]:
    """Return the options of strategies with several processes: the backend, and the seconds of the timeout."""
    values = read(strategy, {"backend": "process_group_backend", "timeout": "_timeout"})
    options = {}
    if values["backend"] is not None:
        options["backend"] = values["backend"]
    if isinstance(values["timeout"], timedelta):
        options["timeout"] = values["timeout"].total_seconds()
    return options
