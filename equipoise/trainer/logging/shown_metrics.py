"""The dictionaries of metrics that users read from a trainer."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from equipoise.trainer.logging.entry import Entry, on_cpu

__all__ = ["DICTIONARIES", "ShownMetrics"]

# Names of the dictionaries, which are fields of `ShownMetrics`.
DICTIONARIES = frozenset({"callback", "logged", "progress_bar"})


class ShownMetrics:
    """The dictionaries of metrics of a trainer.

    Attributes:
        callback: For callbacks.
        logged: For loggers.
        progress_bar: For the progress bar, as tensors on their devices.
    """

    def __init__(self) -> None:
        self.callback: dict[str, Any] = {}
        self.logged: dict[str, Any] = {}
        self.progress_bar: dict[str, Any] = {}

    def update(self, names: frozenset[str], values: Iterable[tuple[str, Tensor, Entry]]) -> None:
        """Write values into dictionaries."""
        for name, value, entry in values:
            if "logged" in names and entry.options.logger:
                self.logged[name] = value
            if "progress_bar" in names and entry.options.prog_bar:
                self.progress_bar[name] = value
            # Callbacks read a forked value by its plain name, too.
            if "callback" in names:
                self.callback[entry.name] = value
                self.callback[name] = value

    def move_to_cpu(self) -> None:
        """Move all values to the CPU."""
        for metrics in (self.callback, self.logged, self.progress_bar):
            metrics.update(on_cpu(metrics))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the contents of the dictionaries, on the CPU."""
        return {
            "callback": on_cpu(self.callback),
            "logged": on_cpu(self.logged),
            "progress_bar": on_cpu(self.progress_bar),
        }

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Replace the contents of the dictionaries."""
        self.callback = dict(state["callback"])
        self.logged = dict(state["logged"])
        self.progress_bar = dict(state["progress_bar"])
