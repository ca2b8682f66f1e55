"""`self.log`: collect values, reduce them, pass them on.

A logged value goes three ways: to loggers, to the progress bar, and to callbacks. It is kept as it was given,
detached and on its device; nothing is read, and nothing is computed for the three, before somebody asks.

    log                 one entry more in `pending`: a failed attempt is forgotten by clearing a list
    commit              at the batch's end: the latest value is kept, epoch sums grow
    read                whoever asks gets a dictionary brought up to date; without asking none is made

Values of a step and values of an epoch never mix: between the first batch of a loop and its end, the dictionaries
show step values.
"""

from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

from equipoise.interop.lightning.self_log import LogOptions, logging_levels
from equipoise.interop.metrics import last_batch_value
from equipoise.notices import rank_zero_warn
from equipoise.parallel.batches.splitting import infer_batch_size
from equipoise.trainer.data.dataloader_iter import check_batch_size
from equipoise.trainer.logging.entry import Collection, Entry, default_dtype, on_cpu, reduction_name

__all__ = ["Logged", "Logs"]

_DICTIONARIES = ("callback", "logged", "progress_bar")
_ALL, _NONE = frozenset(_DICTIONARIES), frozenset[str]()


class Logged(NamedTuple):
    """One call of `self.log` in a part of a batch; see `Logs.add`."""

    hook: str | None
    name: str
    value: Any
    given: tuple[Any, ...]
    batch_size: int | None


class Logs:
    """Everything logged in a run.

    Args:
        reduce: The strategy's reduction over processes; None where there is one.

    Attributes:
        agree: Computes the epoch's values over all processes; None where there is one.
        agree_on_steps: The same for values of a step that are to be synchronised, when they go to the loggers.
        size_of: Finds the number of samples of a batch, which is the weight of its values; None where nobody can tell.
    """

    def __init__(self, reduce: Callable[..., Any] | None = None) -> None:
        self.reduce = reduce
        self.size_of: Callable[[Any], int | None] = infer_batch_size
        self.agree: Callable[[Collection, int | None], None] | None = None
        self.agree_on_steps: Callable[[Collection], None] | None = None
        self.collection: Collection | None = None
        self._entries: dict[tuple[str | None, str, int | None], Entry] = {}  # of the collection, by loader
        self.dataloader_idx: int | None = None
        self.in_batches = False  # from a loop's first batch to its end
        self.pending: list[tuple[Entry, Any, int | None]] = []
        self._batch: Any = None
        self._size: int | None = None
        self._stale: frozenset[str] = _NONE  # the dictionaries that lack something
        self._shown: dict[str, dict[str, Any]] = {name: {} for name in _DICTIONARIES}
        self._parts: dict[int, list[Logged]] = {}  # by thread, while it computes a part of a batch

    # Collect.

    def add(self, hook: str | None, name: str, value: Any, given: tuple[Any, ...], batch_size: int | None) -> None:
        """Takes one value; see `LightningModule.log`.

        Args:
            hook: The hook that logs.
            name: The name.
            value: A number, a tensor of one element, or a metric.
            given: The values of `LogOptions` as they were given.
            batch_size: The weight in a mean; None: the size of the batch.
        """
        if self._parts and (part := self._parts.get(get_ident())) is not None:
            kept = value.detach().clone() if isinstance(value, Tensor) else value
            part.append(Logged(hook, name, kept, given, batch_size))
            return
        entry = self._entries.get((hook, name, self.dataloader_idx))
        if entry is None or entry.given != given:
            entry = self._register(hook, name, value, LogOptions(*given), batch_size)
        self._stale = _ALL
        if isinstance(value, Tensor):
            if value.ndim:
                value = _single(name, value)
            value = value.detach().clone()  # the caller may yet change it in place
        elif isinstance(value, Metric):
            entry.metric, value = value, last_batch_value(value)
        else:
            value = torch.tensor(value, dtype=default_dtype())
        self.pending.append((entry, value, batch_size))
        if not self.in_batches:
            self.commit()

    def _register(self, hook: str | None, name: str, value: Any, given: LogOptions, batch_size: int | None) -> Entry:
        """Checks the arguments, once for each name and hook."""
        if (collection := self.collection) is None:
            raise MisconfigurationException(
                "`self.log` works inside a loop of fit, validate or test; a predict hook, for one, cannot log."
            )
        if hook is None:
            raise MisconfigurationException(
                "`self.log` was called outside of the hooks and steps that the Trainer runs."
            )
        metric = value if isinstance(value, Metric) else None
        if metric is None and not isinstance(value, Tensor | int | float):
            raise ValueError(
                f"`self.log({name!r}, ...)` takes a number, a tensor of one element or a torchmetrics Metric, not"
                f" {type(value).__name__}."
            )
        if given.add_dataloader_idx and "/dataloader_idx_" in name:
            raise MisconfigurationException(
                f"The name {name!r} holds a loader's index. It is appended by itself; say add_dataloader_idx=False to"
                " do so by hand."
            )
        options = self._options(hook, name, given)
        index = self.dataloader_idx
        key = (hook, name, index if given.add_dataloader_idx else None)
        entry = collection.entries.get(key)
        if entry is None:
            entry = collection.entries[key] = Entry(hook, name, options, index, metric)
        elif entry.options != options or entry.dataloader_idx != index:
            raise MisconfigurationException(
                f"`self.log({name!r}, ...)` was called twice in `{hook}` with different arguments: {entry.options},"
                f" then {options}."
            )
        if entry.weighs and batch_size is None:
            check_batch_size(self._batch)
        entry.given = tuple(given)
        self._entries[hook, name, index] = entry
        collection.any_on_step = collection.any_on_step or bool(options.on_step)
        return entry

    @staticmethod
    def _options(hook: str, name: str, given: LogOptions) -> LogOptions:
        """The arguments with the defaults of the hook."""
        on_step, on_epoch = logging_levels(hook, given.on_step, given.on_epoch)
        if not on_step and not on_epoch:
            raise MisconfigurationException(
                f"`self.log({name!r}, on_step=False, on_epoch=False)` in `{hook}` logs nothing."
            )
        return given._replace(
            on_step=on_step,
            on_epoch=on_epoch,
            logger=given.logger is not False,
            reduce_fx=reduction_name(given.reduce_fx),
        )

    def commit(self) -> None:
        """Takes what is pending into steps and epochs."""
        for entry, value, size in self.pending:
            if entry.metric is None and value.dtype is not torch.float32 and value.dtype is not torch.float64:
                if not entry.live and not value.is_floating_point():
                    rank_zero_warn(
                        f"The value logged as {entry.name!r} is of {value.dtype}; it is made floating to be reduced."
                    )
                value = value.to(entry.dtype)
            if size is None:
                size = (self._size or self._find_size()) if entry.weighs else 1
            entry.add(value, size)
        self.pending.clear()

    def _find_size(self) -> int:
        """The size of the batch, which is the weight of its values; found once per batch."""
        if self._batch is None:
            return 1
        self._size = self.size_of(self._batch) or extract_batch_size(self._batch)
        return self._size

    def begin_part(self) -> list[Logged] | None:
        """What this thread logs from now on belongs to one part of a batch; returns what `end_part` is to be given."""
        thread = get_ident()
        outer, self._parts[thread] = self._parts.get(thread), []
        return outer

    def end_part(self, outer: list[Logged] | None) -> list[Logged]:
        """The part is done; returns what it logged.

        Args:
            outer: The part of which this was a part; None if there is none.
        """
        thread = get_ident()
        logged = self._parts.pop(thread)
        if outer is not None:
            self._parts[thread] = outer
        return logged

    # What the loops say.

    def enter(self, collection: Collection | None) -> tuple[Any, ...]:
        """Makes a loop's collection the present one and returns what `leave` needs to go back."""
        self.refresh()
        outer = (self.collection, self._entries, self.dataloader_idx, self.in_batches, self._batch, self._size)
        self.collection, self._entries, self.dataloader_idx = collection, {}, None
        self.in_batches, self._batch, self._size = False, None, None
        return outer

    def leave(self, outer: tuple[Any, ...]) -> None:
        """Goes back to the collection that was present before `enter`."""
        self.refresh()
        self.collection, self._entries, self.dataloader_idx, self.in_batches, self._batch, self._size = outer

    def begin_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """A batch begins; values logged from now on belong to it."""
        self.in_batches, self._batch, self._size, self.dataloader_idx = True, batch, None, dataloader_idx

    def end_batch(self) -> None:
        """The batch is done with all its hooks."""
        if self.pending:
            self.commit()
        self._batch = None

    def forget_steps(self) -> None:
        """This process had no batch in this step, so no values of its own."""
        for entry in self.collection.entries.values() if self.collection is not None else ():
            if entry.syncs:
                entry.step = None

    def end_batches(self, *, show: bool = True) -> None:
        """The loop, or one of its loaders, came to its end: what is read from now on are values of the epoch.

        Args:
            show: Whether they come into the dictionaries at once.
        """
        self.refresh()
        self.in_batches, self._batch, self._size = False, None, None
        self._stale = _ALL
        if self.agree is not None and self.collection is not None:
            self.agree(self.collection, self.dataloader_idx)
        if show:
            self.refresh()

    def reset(self) -> None:
        """Forgets the values of the present loop; the dictionaries keep what they show."""
        self.refresh()
        if self.collection is not None:
            self.collection.reset()
        self.in_batches, self._stale = False, _NONE

    def reset_metrics(self) -> None:
        """Empties the dictionaries."""
        self._shown = {name: {} for name in _DICTIONARIES}

    # State.

    def state_dict(self, collection: Collection, names: dict[int, str]) -> dict[str, Any]:
        """What the epoch has logged so far, for a run that is resumed in its midst.

        Args:
            collection: What the training loop logged.
            names: The names of the module's metrics, by identity.
        """
        self.refresh()
        entries = [entry.state_dict(names) for entry in collection.entries.values() if entry.live]
        return {"callback_metrics": on_cpu(self._shown["callback"]), "entries": entries}

    def load_state_dict(self, state: dict[str, Any], collection: Collection, metrics: dict[str, Any]) -> None:
        """Takes it back.

        Args:
            state: What `state_dict` returned.
            collection: What the training loop logged.
            metrics: The module's metrics, by name.
        """
        self._shown["callback"].update(state["callback_metrics"])
        for saved in state["entries"]:
            entry = Entry.from_state_dict(saved, metrics)
            collection.entries[entry.key] = entry
            collection.any_on_step = collection.any_on_step or bool(entry.options.on_step)
        self._stale = _ALL

    def close(self, *, failed: bool) -> None:
        """Ends a run: what the dictionaries hold is moved to the CPU.

        Args:
            failed: Whether an error ended it; then values of an unfinished batch or epoch are left out.
        """
        if failed:
            self.pending.clear()
        if not failed or self.in_batches:
            self.refresh()
        self.size_of, self.reduce = infer_batch_size, None  # not the run's any more
        self.agree = self.agree_on_steps = None
        self.collection = self._batch = None  # after an error the batch that failed would be kept
        for values in self._shown.values():
            values.update(on_cpu(values))

    def __getstate__(self) -> dict[str, Any]:
        """What is shown; everything else belongs to one run."""
        return {"_shown": self._shown}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """An object as new, which shows the same."""
        self.__init__()  # type: ignore[misc]
        self.show(state["_shown"])

    def shown(self) -> dict[str, dict[str, Any]]:
        """What the dictionaries hold, on the CPU."""
        return {name: on_cpu(values) for name, values in self._shown.items()}

    def show(self, values: dict[str, dict[str, Any]]) -> None:
        """Lets the dictionaries hold other values."""
        self._shown = {name: dict(each) for name, each in values.items()}

    # Read.

    def metrics(self) -> dict[str, Any]:
        """What goes to the loggers now: the values of the step, or those of the epoch."""
        if self.pending:
            self.commit()
        if self.collection is None:
            return {}
        return {name: value for name, value, entry in self._current(self.collection) if entry.options.logger}

    def step_metrics(self) -> dict[str, Any]:
        """What goes to the loggers after a step; asked for in all processes at once."""
        if self.agree_on_steps is not None and self.collection is not None:
            self.agree_on_steps(self.collection)
            self._stale = _ALL
        return self.metrics()

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """What callbacks see."""
        return self.refresh("callback")

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """What loggers were given, or will be."""
        return self.refresh("logged")

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """What the progress bar shows, as tensors on their devices."""
        return self.refresh("progress_bar")

    def refresh(self, *names: str) -> dict[str, Any]:
        """Brings dictionaries up to date and returns the last of them.

        Args:
            names: Which; all by default.
        """
        if self.pending:
            self.commit()
        names = names or _DICTIONARIES
        stale = self._stale.intersection(names)
        if stale and self.collection is not None:
            self._stale = self._stale - stale
            for name, value, entry in self._current(self.collection):
                if "logged" in stale and entry.options.logger:
                    self._shown["logged"][name] = value
                if "progress_bar" in stale and entry.options.prog_bar:
                    self._shown["progress_bar"][name] = value
                if "callback" in stale and (self.collection.training or not self.in_batches):
                    self._shown["callback"][entry.name] = self._shown["callback"][name] = value
        return self._shown[names[-1]]

    def _current(self, collection: Collection) -> Iterator[tuple[str, Tensor, Entry]]:
        """Name, value and entry of everything that has a value now."""
        for entry in collection.entries.values():
            if not entry.live or entry.dataloader_idx != self.dataloader_idx:
                continue
            if self.in_batches:
                name, value = entry.step_name, entry.step if entry.options.on_step else None
            else:
                name, value = entry.epoch_name, entry.epoch(self.reduce) if entry.options.on_epoch else None
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"The metric logged as {entry.name!r} computes {value!r}, but a logged metric must compute a"
                    " tensor."
                )
            yield name, value.detach() if value.requires_grad else value, entry


def _single(name: str, value: Tensor) -> Tensor:
    """A tensor of one element without dimensions."""
    if value.numel() != 1:
        raise ValueError(
            f"`self.log({name!r}, ...)` was called with a tensor of shape {tuple(value.shape)}, but it must have a"
            " single element. Try `.mean()`."
        )
    return value.squeeze()
