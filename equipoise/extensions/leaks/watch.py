"""Watch for leaks: memory that grows from step to step, and the references that hold it.

A sum of losses (`total += loss`) or a list of losses keeps their graphs: every step leaves nodes behind. So the watch
counts the nodes of live graphs that are at least two steps old, after some steps in a row. In a correct program their
number is constant. If it grows repeatedly, the watch searches for the references to the tensors, from names that users
know. The line that wrote a tensor is known for the steps since the first suspicion.

A search through all objects of a process takes as long as some steps. The first search is before the first step, to
exclude the graphs of earlier work. During the first steps, `gc.freeze` sets aside all earlier objects at no cost, so
that a search visits new objects only. Later steps are searched in the same way. After an epoch, all objects are
searched if that takes less than a hundredth of the time.
"""

import gc
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from time import monotonic

from torch import Tensor

from equipoise.extensions.leaks.creation_sites import CreationSites
from equipoise.extensions.leaks.live_tensors import GraphAges, LiveTensors, find_live_tensors, storage_bytes
from equipoise.extensions.leaks.references import find_holders, find_tensors, globals_of_user
from equipoise.formats import format_bytes

__all__ = ["FROZEN_BY_PYTHON", "Leak", "LeakWatch"]

# Python 3.12 itself freezes some hundred objects when it starts. A program that freezes its objects has many more.
FROZEN_BY_PYTHON = 1000

# Steps in which caches and optimiser states come into being.
_WARM_UP = 2
# Growths in a row after which the search for the cause begins, and after which a leak is reported.
_SUSPICIOUS = 3
_GROWTHS = 8
# Steps that are watched without growth, and at most.
_CALM = 8
_MOST_STEPS = 24
# Growths from epoch to epoch after which a leak is reported.
_EPOCHS = 3
# Share of an epoch's time for a search through all objects, and of a run's time for all searches after steps.
_SHARE = 0.01
# Estimate of the seconds for a search through all objects, before the first one.
_GUESS = 0.2
# Tensors whose references are searched.
_MOST_TENSORS = 1000
# Objects that are searched for tensors that existed before.
_MOST_KNOWN = 20_000
# Programs usually keep tensors without a graph on purpose, up to about this size.
_MANY_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Reference that keeps more tensors after every step.

    Attributes:
        holder: Path to the object that keeps the tensors, such as "model.losses"; empty if unknown.
        line: Line that wrote the tensor, as "file:line"; empty if unknown.
        with_graph: True if the tensors keep their graphs.
        tensors: Number of tensors.
        nodes: Number of nodes of earlier steps in their graphs.
        nbytes: Bytes of their storages.
        step: `trainer.global_step` at that moment.
        seconds: Time of that moment, since the run began.
    """

    holder: str
    line: str
    with_graph: bool
    tensors: int
    nodes: int
    nbytes: int
    step: int
    seconds: float

    def __str__(self) -> str:
        """Return the leak in a sentence."""
        holder = self.holder or "something that could not be found"
        line = ""
        if self.line:
            line = f", written at {self.line}"
        if self.with_graph:
            return (
                f"Memory grows with every step: {holder} keeps a tensor together with its graph{line}"
                f" ({self.nodes} nodes after step {self.step}). Keep `.detach()` of it, or `.item()`."
            )
        return (
            f"Memory grows with every step: {holder} keeps {self.tensors} tensors, {format_bytes(self.nbytes)} after"
            f" step {self.step}{line}. Clear it, or keep less."
        )


class _Series:
    """Counter of growths since the last decrease of a number.

    Attributes:
        growths: Number of growths.
        first: The first number.
        last: The last number; -1 before the first.
    """

    def __init__(self) -> None:
        self.growths = 0
        self.first = 0
        self.last = -1

    def add(self, value: int) -> None:
        """Add the next number."""
        if self.last < 0:
            self.first = value
        elif value > self.last:
            self.growths += 1
        elif value < self.last:
            self.growths = 0
        self.last = value


class LeakWatch:
    """Detects tensors that accumulate from step to step.

    Args:
        roots: Returns objects by the names that users know, where the search for references begins; see
            `find_holders`.
        keeps: Returns True for an object that keeps tensors on purpose, as a metric does. Tensors with a graph are
            reported in spite of it.
        began: Start of the run, by `time.monotonic`. Default: now.

    Attributes:
        watches_steps: True while steps are watched.
    """

    def __init__(
        self,
        roots: Callable[[], Mapping[str, object]],
        keeps: Callable[[object], bool],
        *,
        began: float | None = None,
    ) -> None:
        now = monotonic()
        self._roots = roots
        self._keeps = keeps
        self._began = now if began is None else began
        self.watches_steps = False
        # Growth: nodes of old graphs and bytes without a graph from step to step, nodes from epoch to epoch.
        self._nodes = _Series()
        self._plain_bytes = _Series()
        self._epochs = _Series()
        # Sizes by path at the first suspicion, of tensors with a graph (True) and of others (False).
        self._sizes_before: dict[bool, dict[str, int]] = {}
        self._ages = GraphAges()
        self._sites = CreationSites()
        self._steps = 0
        self._earlier_tensors: list[weakref.ref[Tensor]] = []
        self._reported: set[str] = set()
        self._has_frozen = False
        # Seconds of the last search through all objects, and of all searches for steps since the creation.
        self._search_seconds = _GUESS
        self._created = now
        self._spent = 0.0

    def is_worth_it(self) -> bool:
        """Return whether watching more steps keeps the time for all searches a small share of the run's."""
        return self._spent <= _SHARE * (monotonic() - self._created)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = monotonic()
        yield
        self._spent += monotonic() - began

    def start(self) -> None:
        """Begin to watch steps."""
        with self._timed():
            self._start()

    def _start(self) -> None:
        self.watches_steps = True
        self._steps = 0
        self._nodes = _Series()
        self._plain_bytes = _Series()
        self._sizes_before = {}
        if self._ages.rounds == 0:
            self._ages.exclude_present()
        # `total += loss` gives a graph to a tensor that existed before, so these are searched besides new objects.
        earlier = find_tensors(self._named_objects(), self._keeps, _MOST_KNOWN)
        self._earlier_tensors = [weakref.ref(tensor) for tensor in earlier]
        # If the user has frozen objects, they must stay so.
        if gc.get_freeze_count() <= FROZEN_BY_PYTHON:
            gc.freeze()
            self._has_frozen = True

    def stop(self) -> None:
        """Stop watching steps; may be called twice."""
        self.watches_steps = False
        self._sites.stop()
        if self._has_frozen:
            self._has_frozen = False
            gc.unfreeze()

    def after_step(self, step: int) -> list[Leak]:
        """Search for leaks after a step of the optimiser.

        Args:
            step: `trainer.global_step`.

        Returns:
            New leaks; each is returned once.
        """
        with self._timed():
            return self._after_step(step)

    def _after_step(self, step: int) -> list[Leak]:
        self._steps += 1
        if self._steps <= _WARM_UP:
            return []
        # 1. Count nodes and bytes.
        live = self._live_tensors()
        self._nodes.add(live.nodes)
        self._plain_bytes.add(live.plain_bytes)
        # 2. Look for the cause of growth.
        leaks = self._check_growth(self._nodes, live, step, with_graph=True)
        leaks += self._check_growth(self._plain_bytes, live, step, with_graph=False)
        # 3. Stop after a leak, and sooner where nothing grows.
        is_calm = self._nodes.growths < _SUSPICIOUS and self._plain_bytes.growths < _SUSPICIOUS
        most_steps = _CALM if is_calm else _MOST_STEPS
        if leaks or self._steps >= most_steps:
            self.stop()
        return leaks

    def _live_tensors(self) -> LiveTensors:
        """Return the live tensors among new objects and those that existed before."""
        earlier = []
        for reference in self._earlier_tensors:
            tensor = reference()
            if tensor is not None:
                earlier.append(tensor)
        # A list of both would contain itself.
        return find_live_tensors(chain(earlier, gc.get_objects()), self._ages)

    def _check_growth(self, series: _Series, live: LiveTensors, step: int, *, with_graph: bool) -> list[Leak]:
        """Begin to record at the first suspicion; return the leaks when growth continues."""
        if series.growths == _SUSPICIOUS and with_graph not in self._sizes_before:
            self._sizes_before[with_graph] = self._sizes(live, with_graph=with_graph)
            self._sites.start()
            return []
        is_large = with_graph or series.last - series.first >= _MANY_BYTES
        if series.growths >= _GROWTHS and is_large:
            return self._new_leaks(live, step, with_graph=with_graph)
        return []

    def after_epoch(self, step: int, seconds: float) -> list[Leak]:
        """Search all objects after an epoch, unless that takes too long.

        Args:
            step: `trainer.global_step`.
            seconds: Duration of the epoch.

        Returns:
            New leaks; each is returned once.
        """
        if self._search_seconds > _SHARE * seconds:
            return []
        began = monotonic()
        live = find_live_tensors(gc.get_objects(), self._ages)
        self._search_seconds = monotonic() - began
        self._epochs.add(live.nodes)
        if self._epochs.growths == _EPOCHS - 1:
            self._sizes_before[True] = self._sizes(live, with_graph=True)
        if self._epochs.growths < _EPOCHS:
            return []
        return self._new_leaks(live, step, with_graph=True)

    # The cause.

    def _named_objects(self) -> dict[str, object]:
        """Return the roots and global variables without the trainer, which refers to everything."""
        roots = dict(self._roots())
        roots.pop("trainer", None)
        return {**roots, **globals_of_user()}

    def _holders(self, live: LiveTensors, *, with_graph: bool) -> dict[str, list[Tensor]]:
        """Return the tensors by the path to the object that keeps them."""
        if with_graph:
            tensors = live.with_graph[-_MOST_TENSORS:]
            keeps: Callable[[object], bool] = lambda _: False  # noqa: E731
        else:
            tensors = live.plain[-_MOST_TENSORS:]
            keeps = self._keeps
        targets = {id(tensor): tensor for tensor in tensors}
        paths = find_holders(targets, {**self._roots(), **globals_of_user()}, keeps)
        holders: dict[str, list[Tensor]] = {}
        for tensor in tensors:
            path = paths.get(id(tensor))
            if path is not None:
                holders.setdefault(_general(path), []).append(tensor)
        return holders

    def _size(self, tensors: Iterable[Tensor], *, with_graph: bool) -> int:
        """Return the number of old nodes, or the bytes of tensors without a graph."""
        if with_graph:
            return self._ages.count_old(tensors)
        return storage_bytes(tensors)

    def _sizes(self, live: LiveTensors, *, with_graph: bool) -> dict[str, int]:
        """Return the sizes by the path to the object that keeps the tensors."""
        sizes = {}
        for path, tensors in self._holders(live, with_graph=with_graph).items():
            sizes[path] = self._size(tensors, with_graph=with_graph)
        return sizes

    def _new_leaks(self, live: LiveTensors, step: int, *, with_graph: bool) -> list[Leak]:
        """Return leaks for paths that have grown since the first suspicion and that were not reported."""
        sizes_before = self._sizes_before.get(with_graph, {})
        seconds = monotonic() - self._began
        # 1. Choose the paths that have grown.
        holders = self._holders(live, with_graph=with_graph)
        growing = {}
        for path, tensors in holders.items():
            if self._size(tensors, with_graph=with_graph) > sizes_before.get(path, 0):
                growing[path] = tensors
        # 2. A leak of graphs is certain, also if the search has not reached its holder.
        if with_graph and not growing:
            unreached = _without(live.with_graph, holders.values())
            if self._ages.count_old(unreached):
                growing[""] = unreached
        # 3. Describe the new ones.
        leaks = []
        for path, tensors in growing.items():
            if path in self._reported:
                continue
            leak = Leak(
                holder=path,
                line=self._last_line(tensors),
                with_graph=with_graph,
                tensors=len(tensors),
                nodes=self._ages.count_old(tensors) if with_graph else 0,
                nbytes=storage_bytes(tensors),
                step=step,
                seconds=seconds,
            )
            leaks.append(leak)
        self._reported |= set(growing)
        return leaks

    def _last_line(self, tensors: list[Tensor]) -> str:
        """Return the line that wrote the last tensor with a known line, empty without one."""
        for tensor in reversed(tensors):
            line = self._sites.of(tensor)
            if line:
                return line
        return ""


def _without(tensors: Iterable[Tensor], groups: Iterable[list[Tensor]]) -> list[Tensor]:
    ids = {id(tensor) for tensor in chain.from_iterable(groups)}
    return [tensor for tensor in tensors if id(tensor) not in ids]


def _general(path: str) -> str:
    """Return a path without the indices that differ between the elements of a container."""
    path = re.sub(r"\[\d+\]", "[…]", path)
    # Numbers within the keys of dictionaries are indices too.
    path = re.sub(r"(?<=\[)'[^']*'(?=\])", lambda key: re.sub(r"\d+", "…", key[0]), path)
    return re.sub(r"(\[…\])+$", "", path)
