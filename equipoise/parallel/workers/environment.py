"""Settings of a process that its workers need: environment, torch's modes, generators, warning filters.

A server forks the workers. Its settings are those of the program when the server started, and torch's defaults. So the
parent sends its present settings to each worker.
"""

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from equipoise.parallel.payload.object_pickling import can_be_packed
from equipoise.parallel.snapshot import random_state
from equipoise.parallel.snapshot.random_state import RandomState
from equipoise.parallel.workers import torch_modes

__all__ = ["ProcessEnvironment"]


@dataclass(frozen=True)
class _WarningFilter:
    """Filter of warnings in the form of the arguments of `warnings.filterwarnings`."""

    action: Any
    message: str
    category: type[Warning]
    module: str
    line: int

    @classmethod
    def of(cls, entry: tuple[Any, ...]) -> "_WarningFilter":
        """Return the filter of an entry of `warnings.filters`."""
        action, message, category, module, line = entry
        return cls(action, _expression(message), category, _expression(module), line)

    def append(self) -> None:
        """Append this filter to those of this process."""
        warnings.filterwarnings(self.action, self.message, self.category, self.module, self.line, append=True)


def _expression(pattern: Any) -> str:
    """Return the regular expression of a part of a filter, which is None, a compiled one, or literal text."""
    if pattern is None:
        return ""
    if isinstance(pattern, str):
        return rf"{re.escape(pattern)}\Z"
    text: str = pattern.pattern
    return text


def _warning_filters() -> list[_WarningFilter]:
    """Return the filters of this process whose categories can be sent.

    Python does not document the form of its list of filters: an entry of another form is left out.
    """
    filters = []
    for entry in getattr(warnings, "filters", ()):
        try:
            warning_filter = _WarningFilter.of(entry)
        except (TypeError, ValueError, AttributeError):
            continue
        if can_be_packed(warning_filter.category):
            filters.append(warning_filter)
    return filters


def _warning_format() -> Callable[..., str] | None:
    """Return the function that formats warnings in this process; None if it cannot be sent."""
    if not can_be_packed(warnings.formatwarning):
        return None
    return warnings.formatwarning


@dataclass(frozen=True)
class ProcessEnvironment:
    """Settings of the process that creates this object.

    Attributes:
        environment: Environment variables.
        modes: Torch's modes by name.
        random: State of the random generators.
        folder: Working folder.
        warning_filters: Filters of warnings, the first match counts.
        warning_format: Function that formats a warning; None for that of the worker.
    """

    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    modes: dict[str, Any] = field(default_factory=torch_modes.capture)
    random: RandomState = field(default_factory=random_state.capture)
    folder: str = field(default_factory=os.getcwd)
    warning_filters: list[_WarningFilter] = field(default_factory=_warning_filters)
    warning_format: Callable[..., str] | None = field(default_factory=_warning_format)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, with the variables of this moment: loggers of services set some as they are pickled."""
        return vars(self) | {"environment": dict(os.environ)}

    def restore(self) -> None:
        """Apply the settings to this process."""
        os.environ.clear()
        os.environ.update(self.environment)
        torch_modes.restore(self.modes)
        self.random.restore()
        os.chdir(self.folder)
        warnings.resetwarnings()
        for warning_filter in self.warning_filters:
            warning_filter.append()
        if self.warning_format is not None:
            warnings.formatwarning = self.warning_format
