"""The trainer's logs: collect the values that `self.log` adds, reduce them, pass them on.

A logged value goes three ways: to loggers, to the progress bar, and to callbacks. It stays detached on its device.
Nothing is read, and nothing is computed for the three, before one of them asks for it.

    add                 append to `pending`: values of a failed attempt are dropped by clearing a list
    commit              at the batch's end: keep the latest value, add it to the epoch's sum
    refresh             when a dictionary of metrics is read: bring it up to date

Values of a step and values of an epoch never mix: between the first batch of a loop and its end, the dictionaries
show values of steps.
"""

from collections.abc import Callable, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import Metric

from equipoise.interop.lightning.self_log import LogOptions
from equipoise.interop.metrics import last_batch_value
from equipoise.interop.module_metrics import named_metrics
from equipoise.parallel.batches.splitting import Splitter
from equipoise.trainer.logging.arguments import check_value, complete_options, whole_value, without_dimensions
from equipoise.trainer.logging.collection import Captures, Collection, Logged
from equipoise.trainer.logging.entry import Entry, default_dtype, on_cpu

if TYPE_CHECKING:
    from equipoise.trainer.logging.agreement import LogAgreement
    from equipoise.trainer.logging.cross_process import LogReduction

__all__ = ["Logs", "SizeOf"]

# Names of the dictionaries of metrics: for callbacks, for loggers, and for the progress bar.
_DICTIONARIES = frozenset({"callback", "logged", "progress_bar"})
_NONE = frozenset[str]()

# Hook, name, and index of the loader, which together identify an entry.
_Key = tuple[str | None, str, int | None]


# Returns the number of samples of a batch; see `Logs.connect_run`.
SizeOf = Callable[[Any, int | None], int | None]
_UNCONNECTED: SizeOf = Splitter(None).size_of_drawn

# The attributes of the present loop, within which another one may run, such as a validation in a training.
_OF_A_LOOP = ("collection", "dataloader_idx", "in_batches", "_entries", "_batch", "_drawn", "_size")


class Logs:
    """Everything logged in a run.

    Attributes:
        collection: Values of the present loop; None if the loop cannot log.
        dataloader_idx: Index of the present loader, if there are several loaders.
        in_batches: True from a loop's first batch to its end.
        pending: Entry, value and batch size of each call of `self.log` in the present batch.
        captures: Values of shares of the batch, which are logged after all shares were computed.
    """

    def __init__(self) -> None:
        # 1. Parts of the run; see `connect_run`.
        self._size_of: SizeOf = _UNCONNECTED
        self._reduction: LogReduction | LogAgreement | None = None
        # Identities of the metrics of each module that logs, by that of the module: there are copies.
        self._known_metrics: dict[int, frozenset[int]] = {}
        # 2. The present loop.
        self.collection: Collection | None = None
        self.dataloader_idx: int | None = None
        self.in_batches = False
        # Entries of the collection that the present loop has used.
        self._entries: dict[_Key, Entry] = {}
        # 3. The present batch, the number of samples that the loader has drawn, and that of the batch once it is
        #    computed.
        self._batch: Any = None
        self._drawn: int | None = None
        self._size: int | None = None
        self.pending: list[tuple[Entry, Any, int | None]] = []
        self.captures = Captures()
        self._captured = self.captures.by_thread
        # 4. The dictionaries of metrics, and the names of those that are not up to date.
        self.reset_metrics()
        self._stale: frozenset[str] = _NONE

    # The run.

    def connect_run(self, size_of: SizeOf, reduction: "LogReduction | LogAgreement | None" = None) -> None:
        """Begin a run.

        Args:
            size_of: Return the number of samples of a batch, which is the weight of its values, from the batch and
                the number that its loader has drawn; None if unknown.
            reduction: Reduction over the processes of the run. Default: None, a single process.
        """
        self._size_of = size_of
        self._reduction = reduction
        self._known_metrics = {}

    def close(self, *, failed: bool) -> None:
        """End a run: move the metrics to the CPU, and release the parts of the run.

        Args:
            failed: True if an error ended it. Values of an unfinished batch or epoch are then left out.
        """
        if failed:
            self.pending.clear()
        if not failed or self.in_batches:
            self.refresh()
        self._size_of = _UNCONNECTED
        self._reduction = None
        # After an error these would keep the batch that failed.
        self.collection = None
        self._batch = None
        for metrics in self._shown.values():
            metrics.update(on_cpu(metrics))

    # Values.

    def add(
        self,
        hook: str | None,
        name: str,
        value: Any,
        arguments: tuple[Any, ...],
        batch_size: int | None,
        owner: nn.Module | None = None,
    ) -> None:
        """Add one value; see `LightningModule.log`.

        Args:
            hook: The hook that logs.
            name: The name.
            value: A number, a tensor of one element, or a metric.
            arguments: The values of `LogOptions` as the user passed them.
            batch_size: The weight in a mean, in samples. None: the size of the batch.
            owner: The module that logs, which must have the metric. Default: None, no matter which.
        """
        # 1. A value of weights in shards is put together here, where all processes log it. Values of a share of the
        #    batch wait until all shares are computed.
        if isinstance(value, Tensor) and type(value) is not Tensor:
            value = whole_value(value)
        if self._captured:
            captured = self._captured.get(get_ident())
            if captured is not None:
                if isinstance(value, Tensor):
                    value = value.detach().clone()
                elif isinstance(value, (int, float)):
                    # The default dtype is that of the step only here.
                    value = torch.tensor(value, dtype=default_dtype(), device="cpu")
                elif isinstance(value, Metric):
                    self._check_owner(name, value, owner)
                captured.append(Logged(hook, name, value, arguments, batch_size))
                return
        # 2. Find the entry. Arguments are checked when they are new.
        entry = self._entries.get((hook, name, self.dataloader_idx))
        if entry is None or entry.arguments != arguments:
            entry = self._register(hook, name, value, LogOptions(*arguments), batch_size)
        self._stale = _DICTIONARIES
        # 3. Copy the value, as the caller may change it in place.
        if isinstance(value, Tensor):
            if value.ndim:
                value = without_dimensions(name, value)
            value = value.detach().clone()
        elif isinstance(value, Metric):
            self._check_owner(name, value, owner)
            entry.metric = value
            value = last_batch_value(value)
        else:
            value = torch.tensor(value, dtype=default_dtype())
        self.pending.append((entry, value, batch_size))
        if not self.in_batches:
            self.commit()

    def _check_owner(self, name: str, metric: Metric, owner: nn.Module | None) -> None:
        """Check that the module that logs a metric has it: no other is resumed, repeated, or put together."""
        if owner is None or id(metric) in self._known_metrics.get(id(owner), ()):
            return
        known = self._known_metrics[id(owner)] = frozenset(map(id, named_metrics(owner).values()))
        if id(metric) not in known:
            raise MisconfigurationException(
                f"The metric logged as {name!r} is no attribute of the module, so it would not be resumed. Make it one,"
                " also in a list or dictionary: `self.metric = ...`."
            )

    def _register(
        self, hook: str | None, name: str, value: Any, arguments: LogOptions, batch_size: int | None
    ) -> Entry:
        """Check new arguments, and return the entry of the value."""
        collection = self.collection
        if collection is None:
            raise MisconfigurationException(
                "`self.log` works inside a loop of fit, validate or test; a predict hook, for one, cannot log."
            )
        if hook is None:
            raise MisconfigurationException(
                "`self.log` was called outside of the hooks and steps that the Trainer runs."
            )
        # 1. Check the arguments.
        check_value(name, value)
        options = complete_options(hook, name, arguments)
        # 2. Find the entry of this name, or add one.
        metric = None
        if isinstance(value, Metric):
            metric = value
        new_entry = Entry(hook, name, options, self.dataloader_idx, metric, arguments=tuple(arguments))
        entry = collection.register(new_entry)
        self._entries[hook, name, self.dataloader_idx] = entry
        return entry

    def commit(self) -> None:
        """Add the pending values to those of the step and the epoch."""
        for entry, value, size in self.pending:
            if entry.metric is None and value.dtype is not torch.float32 and value.dtype is not torch.float64:
                value = entry.convert(value)
            if size is None:
                size = (self._size or self.batch_size()) if entry.is_mean else 1
            entry.add(value, size)
        self.pending.clear()

    def batch_size(self) -> int:
        """Return the number of samples of the batch; computed once per batch."""
        if self._batch is None:
            return 1
        if self._size is None:
            self._size = self._size_of(self._batch, self._drawn) or extract_batch_size(self._batch)
        return self._size

    # Loops and batches.

    def enter(self, collection: Collection | None) -> dict[str, Any]:
        """Begin a loop.

        Args:
            collection: Its values; None if it cannot log.

        Returns:
            The argument of `leave`.
        """
        # The dictionaries must show the last values of the outer loop before it is suspended.
        self.refresh()
        outer = {name: getattr(self, name) for name in _OF_A_LOOP}
        self.collection = collection
        self.dataloader_idx = None
        self.in_batches = False
        self._entries = {}
        self._batch = None
        self._size = None
        return outer

    def leave(self, outer: dict[str, Any]) -> None:
        """End a loop, and continue the one around it, which is the result of `enter`."""
        self.refresh()
        for name, value in outer.items():
            setattr(self, name, value)

    def begin_batch(self, batch: Any, dataloader_idx: int | None = None, drawn: int | None = None) -> None:
        """Begin a batch, to which values belong from now on.

        Args:
            batch: The batch.
            dataloader_idx: Index of its loader. Default: None, there is one.
            drawn: The number of samples that its loader has drawn for it. Default: None, unknown.
        """
        self.in_batches = True
        self._batch = batch
        self._drawn = drawn
        self._size = None
        self.dataloader_idx = dataloader_idx

    def end_batch(self) -> None:
        """End a batch, all of whose hooks were called."""
        if self.pending:
            self.commit()
        self._batch = None

    def forget_steps(self) -> None:
        """Forget the synchronised values of a step in which this process has no batch."""
        if self.collection is not None:
            self.collection.forget_synchronized_steps()

    def end_batches(self, *, show: bool = True) -> None:
        """End the batches of a loop, or of one of its loaders. From now on, values of the epoch are read.

        Args:
            show: True to bring the dictionaries of metrics up to date immediately.
        """
        # 1. Let the dictionaries keep the values of the last step.
        self.refresh()
        # 2. Change to values of the epoch, which all processes compute together.
        self.in_batches = False
        self._batch = None
        self._size = None
        self.share_values()
        if show:
            self.refresh()

    def share_values(self) -> None:
        """Let all processes know what some have logged since the batches ended. All processes must call this together.

        A hook of the epoch's end may log in the main process alone, and callbacks of all processes monitor the value.
        """
        if self.pending:
            self.commit()
        self._stale = _DICTIONARIES
        if self._reduction is None or self.collection is None:
            return
        self._reduction.reduce_epoch_values(self.collection, self.dataloader_idx)
        for name, value, entry in self.collection.values_of_step(self.dataloader_idx):
            if entry.options.rank_zero_only:
                self._shown["callback"][name] = value

    def reset(self) -> None:
        """Forget the values of the present loop. The dictionaries of metrics stay."""
        self.refresh()
        if self.collection is not None:
            self.collection.reset()
        self.in_batches = False
        self._stale = _NONE

    # Dictionaries of metrics.

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Metrics for callbacks."""
        self.refresh("callback")
        return self._shown["callback"]

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """Metrics for loggers."""
        self.refresh("logged")
        return self._shown["logged"]

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """Metrics for the progress bar, as tensors on their devices."""
        self.refresh("progress_bar")
        return self._shown["progress_bar"]

    def metrics(self) -> dict[str, Any]:
        """Return the present values for the loggers: those of the step, or those of the epoch."""
        if self.pending:
            self.commit()
        if self.collection is None:
            return {}
        return {name: value for name, value, entry in self._current(self.collection) if entry.options.logger}

    def step_metrics(self) -> dict[str, Any]:
        """Return the values of a step for the loggers. All processes must call this together."""
        if self._reduction is not None and self.collection is not None:
            self._reduction.sync_step_values(self.collection)
            self._stale = _DICTIONARIES
        return self.metrics()

    def refresh(self, *names: str) -> None:
        """Bring dictionaries of metrics up to date.

        Args:
            names: Some of "callback", "logged" and "progress_bar". Default: all.
        """
        if self.pending:
            self.commit()
        stale = self._stale.intersection(names or _DICTIONARIES)
        if not stale or self.collection is None:
            return
        self._stale = self._stale - stale
        # Callbacks see values of an evaluation after its last batch.
        if self.in_batches and not self.collection.training:
            stale = stale - {"callback"}
        for name, value, entry in self._current(self.collection):
            if "logged" in stale and entry.options.logger:
                self._shown["logged"][name] = value
            if "progress_bar" in stale and entry.options.prog_bar:
                self._shown["progress_bar"][name] = value
            # Callbacks read a forked value by its plain name, too.
            if "callback" in stale:
                self._shown["callback"][entry.name] = value
                self._shown["callback"][name] = value

    def _current(self, collection: Collection) -> Iterator[tuple[str, Tensor, Entry]]:
        """Return name, value and entry of everything that has a value now."""
        if self.in_batches:
            return collection.values_of_step(self.dataloader_idx)
        return collection.values_of_epoch(self.dataloader_idx)

    def reset_metrics(self) -> None:
        """Empty the dictionaries of metrics."""
        self._shown: dict[str, dict[str, Any]] = {name: {} for name in _DICTIONARIES}

    # State.

    def state_dict(self, collection: Collection, names: dict[int, str]) -> dict[str, Any]:
        """Return what the epoch has logged so far, for a run that resumes within it."""
        self.refresh()
        entries = [entry.state_dict(names) for entry in collection.entries.values() if entry.live]
        return {"callback_metrics": on_cpu(self._shown["callback"]), "entries": entries}

    def load_state_dict(self, state: dict[str, Any], collection: Collection, metrics: dict[str, Any]) -> None:
        """Load what the epoch of an earlier run has logged."""
        self._shown["callback"].update(state["callback_metrics"])
        for saved in state["entries"]:
            collection.add(Entry.from_state_dict(saved, metrics))
        self._stale = _DICTIONARIES

    def shown(self) -> dict[str, dict[str, Any]]:
        """Return the contents of the dictionaries of metrics, on the CPU."""
        return {name: on_cpu(metrics) for name, metrics in self._shown.items()}

    def show(self, values: dict[str, dict[str, Any]]) -> None:
        """Replace the contents of the dictionaries of metrics by the result of `shown` in another process."""
        self._shown = {name: dict(metrics) for name, metrics in values.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Return the dictionaries of metrics; everything else belongs to one run."""
        return {"_shown": self._shown}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a new object that shows the same metrics."""
        self.__init__()  # type: ignore[misc]
        self._shown = state["_shown"]
