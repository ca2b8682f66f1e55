"""Containers of logged values: those of a loop, and those of a share of a batch."""

from collections.abc import Iterator
from threading import get_ident
from typing import Any, NamedTuple

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from equipoise.notices import rank_zero_warn
from equipoise.trainer.logging.entry import Entry

__all__ = ["Captures", "Collection", "Logged"]


class Collection:
    """Everything that one loop logged.

    Args:
        training: True if callbacks can read values of steps, too.

    Attributes:
        any_on_step: True if an entry has values of steps.
        entries: The entries by their keys.
    """

    def __init__(self, *, training: bool) -> None:
        self.training = training
        self.any_on_step = False
        self.entries: dict[tuple[str, str, int | None], Entry] = {}

    def add(self, entry: Entry) -> None:
        """Add an entry, or replace that of the same key."""
        self.entries[entry.key] = entry
        if entry.options.on_step:
            self.any_on_step = True

    def register(self, entry: Entry) -> Entry:
        """Add an entry, unless there is one of its key.

        Returns:
            The entry of the key, which has the arguments of the new one.

        Raises:
            MisconfigurationException: If the present entry has other options, or is that of another loader.
        """
        present = self.entries.get(entry.key)
        if present is None:
            self._warn_of_namesake(entry)
            self.add(entry)
            return entry
        hook, name, _ = entry.key
        if present.dataloader_idx != entry.dataloader_idx:
            raise MisconfigurationException(
                f"`self.log({name!r}, ..., add_dataloader_idx=False)` in `{hook}` has one name for the values of"
                f" loaders {present.dataloader_idx} and {entry.dataloader_idx}. Leave add_dataloader_idx out, or"
                " give each loader a name of its own."
            )
        if present.options != entry.options:
            raise MisconfigurationException(
                f"`self.log({name!r}, ...)` was called twice in `{hook}` with different arguments: {present.options},"
                f" then {entry.options}."
            )
        present.arguments = entry.arguments
        return present

    def _warn_of_namesake(self, entry: Entry) -> None:
        """Warn if a value will hide that of another hook, of a step or of an epoch."""
        for other in self.entries.values():
            hides_step = entry.options.on_step and other.options.on_step and entry.step_name == other.step_name
            hides_epoch = entry.options.on_epoch and other.options.on_epoch and entry.epoch_name == other.epoch_name
            # "step" is the x-axis of loggers.
            if entry.name != "step" and entry.key[0] != other.key[0] and (hides_step or hides_epoch):
                rank_zero_warn(
                    f"{entry.name!r} is logged in `{other.key[0]}` and in `{entry.key[0]}`: loggers and callbacks see"
                    " the value of the latter alone. Give each a name of its own."
                )
                return

    def names(self) -> set[str]:
        """Return the names of all values that were ever logged here, of steps and of epochs."""
        names = {entry.step_name for entry in self.entries.values()}
        return names.union(entry.epoch_name for entry in self.entries.values())

    def reset(self) -> None:
        """Forget all values, and reset the metrics among them."""
        for entry in self.entries.values():
            entry.forget()
            if entry.metric is not None:
                entry.metric.reset()

    def forget_synchronized_steps(self) -> None:
        """Forget the values of a step that are synchronised over processes."""
        for entry in self.entries.values():
            if entry.syncs_steps:
                entry.step = None

    def values_of_step(self, dataloader_idx: int | None) -> Iterator[tuple[str, Tensor, Entry]]:
        """Yield name, value and entry of everything that has a value of the present step.

        Args:
            dataloader_idx: The present loader; None if there is one loader.
        """
        for entry in self._live_entries(dataloader_idx):
            if entry.options.on_step and entry.step is not None:
                yield entry.step_name, _checked(entry, entry.step), entry

    def values_of_epoch(self, dataloader_idx: int | None) -> Iterator[tuple[str, Tensor, Entry]]:
        """Yield name, value and entry of everything that has a value of the epoch.

        Args:
            dataloader_idx: The present loader; None if there is one loader.
        """
        for entry in self._live_entries(dataloader_idx):
            if not entry.options.on_epoch:
                continue
            value = entry.epoch()
            if value is not None:
                yield entry.epoch_name, _checked(entry, value), entry

    def reset_metrics(self, dataloader_idx: int) -> None:
        """Reset the metrics that a loader has logged, once their values are read."""
        for entry in self._live_entries(dataloader_idx):
            if entry.metric is not None:
                entry.metric.reset()

    def _live_entries(self, dataloader_idx: int | None) -> Iterator[Entry]:
        for entry in self.entries.values():
            if entry.live and entry.dataloader_idx == dataloader_idx:
                yield entry


def _checked(entry: Entry, value: Any) -> Tensor:
    """Return a value without its graph. A metric can compute anything; only tensors can be logged."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"The metric logged as {entry.name!r} computes {value!r}, but a logged metric must compute a tensor."
        )
    if value.requires_grad:
        return value.detach()
    return value


class Logged(NamedTuple):
    """One call of `self.log` in a share of a batch; see `Logs.add`."""

    hook: str | None
    name: str
    value: Any
    arguments: tuple[Any, ...]
    batch_size: int | None


class Captures:
    """Values that threads log while each computes a share of a batch. They are logged once, for the whole batch, later.

    Attributes:
        by_thread: The values of the share that a thread computes, by the thread's number.
    """

    def __init__(self) -> None:
        self.by_thread: dict[int, list[Logged]] = {}

    def begin(self) -> list[Logged] | None:
        """Capture what this thread logs from now on.

        Returns:
            The argument of `end`.
        """
        thread = get_ident()
        outer = self.by_thread.get(thread)
        self.by_thread[thread] = []
        return outer

    def end(self, outer: list[Logged] | None) -> list[Logged]:
        """End a capture, and return what this thread has logged in it."""
        thread = get_ident()
        logged = self.by_thread.pop(thread)
        if outer is not None:
            self.by_thread[thread] = outer
        return logged
