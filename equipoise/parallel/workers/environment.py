"""Settings of a process that its workers need: environment, torch's modes, generators, warning filters.

It is taken along to workers. A worker is forked by a server that knows the program as it was when the server was
started, and torch as it comes.
"""

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from equipoise.parallel.payload.shared_payload import can_be_packed
from equipoise.parallel.snapshot import random_state
from equipoise.parallel.snapshot.random_state import RandomState
from equipoise.parallel.workers import torch_modes

__all__ = ["ProcessEnvironment"]


@dataclass(frozen=True)
class _WarningFilter:
    """One filter of warnings, as `warnings.filterwarnings` takes it."""

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
        """Let this filter follow those of this process."""
        warnings.filterwarnings(self.action, self.message, self.category, self.module, self.line, append=True)


def _expression(pattern: Any) -> str:
    """Return the regular expression of a part of a filter: none, a compiled one, or text that matches itself alone."""
    if pattern is None:
        return ""
    if isinstance(pattern, str):
        return rf"{re.escape(pattern)}\Z"
    text: str = pattern.pattern
    return text


def _warning_filters() -> list[_WarningFilter]:
    filters = [_WarningFilter.of(entry) for entry in warnings.filters]
    return [each for each in filters if can_be_packed(each.category)]


def _warning_format() -> Callable[..., str] | None:
    """Return how this process formats warnings; None if that cannot be sent."""
    return warnings.formatwarning if can_be_packed(warnings.formatwarning) else None


@dataclass(frozen=True)
class ProcessEnvironment:
    """Taken from the process that makes it.

    Attributes:
        environment: The variables.
        modes: Torch's modes.
        random: The random generators.
        folder: The working folder.
        warning_filters: Which warnings are shown, in the order in which filters are asked.
        warning_format: Makes the text of a warning; None: as the process does by itself.
    """

    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    modes: dict[str, Any] = field(default_factory=torch_modes.capture)
    random: RandomState = field(default_factory=random_state.capture)
    folder: str = field(default_factory=os.getcwd)
    warning_filters: list[_WarningFilter] = field(default_factory=_warning_filters)
    warning_format: Callable[..., str] | None = field(default_factory=_warning_format)

    def restore(self) -> None:
        """Make them those of this process."""
        os.environ.clear()
        os.environ.update(self.environment)
        torch_modes.restore(self.modes)
        self.random.restore()
        os.chdir(self.folder)
        warnings.resetwarnings()
        for each in self.warning_filters:
            each.append()
        if self.warning_format is not None:
            warnings.formatwarning = self.warning_format
