"""Watch for leaks: memory that grows from step to step, and the references that hold it.

A loss that is summed up (`total += loss`) or appended to a list brings its graph along: every step leaves nodes behind.
So the nodes of graphs that Python's tensors still hold, and that were there two steps ago, are counted after some steps
in a row; in a healthy run their number does not change. Where it grows again and again, the tensors' holders are looked
for, from what people know by name, and the line that wrote the tensor is the one that was seen to write it in the steps
since the first suspicion.

Looking through all objects of a process takes as long as some steps. It is done once before the first step, to mark the
graphs that are there. In the first steps it is spared: what was there before is set aside with `gc.freeze`, which costs
nothing, so only what has come since is looked at. Later steps are looked at in the same way, and after an epoch all
objects are, if that takes less than a hundredth of the time.
"""

import gc
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from time import monotonic
from typing import Any

from torch import Tensor

from equipoise.memory.devices import format_bytes
from equipoise.memory.leaks.creation_sites import Origins
from equipoise.memory.leaks.references import find_holders, find_tensors, globals_of_user

__all__ = ["Leak", "LeakWatch"]

_WARM_UP = 2  # steps in which caches and states are made
_SUSPICIOUS, _GROWTHS = 3, 8  # growths after which one begins to look for the cause, and after which it is told
_CALM, _MOST_STEPS = 8, 24  # steps that are looked at where nothing grows, and at most
_EPOCHS = 3  # growths from epoch to epoch
_SHARE = 0.01  # of an epoch's time that looking through everything may take, and of a run's that looks at steps may
_GUESS = 0.2  # seconds that it takes, before it was ever done
_MOST_NODES, _MOST_TENSORS = 50_000, 1000
_MOST_KNOWN = 20_000  # objects among which tensors are looked for that were there before
_OLD = 2  # steps that a node must have outlived
_WATCHES = count()  # so far; each has a stamp of its own for nodes, of which some may outlive the run
_MANY_BYTES = 64 * 2**20  # tensors without a graph are kept on purpose, as a rule, until they are many


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Something that keeps more tensors after every step.

    Attributes:
        holder: A path to what keeps them, such as "model.losses"; empty if it was not found.
        line: Where the tensor was written, as "file:line"; empty if it is not known.
        with_graph: Whether the tensors keep the graph that made them.
        tensors: How many there were when it was noticed.
        nodes: How many nodes of graphs of earlier steps they held.
        nbytes: The bytes of their storages.
        step: `trainer.global_step` at that moment.
        seconds: The time of that moment, since the run began.
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
        """The leak in a sentence."""
        holder = self.holder or "something that could not be found"
        made = f", written at {self.line}" if self.line else ""
        if self.with_graph:
            return (
                f"Memory grows with every step: {holder} keeps a tensor together with its graph{made}"
                f" ({self.nodes} nodes after step {self.step}). Keep `.detach()` of it, or `.item()`."
            )
        return (
            f"Memory grows with every step: {holder} keeps {self.tensors} tensors, {format_bytes(self.nbytes)} after"
            f" step {self.step}{made}. Clear it, or keep less."
        )


@dataclass
class _Alive:
    """The tensors that Python holds: those with a graph, the old nodes of their graphs, and those without one."""

    with_graph: list[Tensor]
    nodes: int
    plain: list[Tensor]

    @property
    def nbytes(self) -> int:
        """The bytes of those without a graph."""
        return _bytes(self.plain)


class _Series:
    """How often a number has grown without ever having shrunk."""

    def __init__(self) -> None:
        self.growths, self.first, self.last = 0, 0, -1

    def add(self, value: int) -> None:
        """The next number."""
        if self.last < 0:
            self.first = value
        elif value != self.last:
            self.growths = self.growths + 1 if value > self.last else 0
        self.last = value


class LeakWatch:
    """Looks after a step whether more is alive than after those before.

    Args:
        roots: Returns what people know by name, to look for holders in it; see `find_holders`.
        keeps: Says of an object that it keeps tensors on purpose, as a metric does. Those with a graph are told anyway.
        began: When the run began, of the clock `time.monotonic`. Default: now.

    Attributes:
        watches_steps: Whether steps are still looked at.
    """

    def __init__(
        self,
        roots: Callable[[], Mapping[str, object]],
        keeps: Callable[[object], bool],
        *,
        began: float | None = None,
    ) -> None:
        self._roots, self._keeps = roots, keeps
        self._began = monotonic() if began is None else began
        self._nodes, self._plain, self._epochs = _Series(), _Series(), _Series()
        self._before: dict[bool, dict[str, int]] = {}
        self._origins, self._stamp = Origins(), f"equipoise.look.{next(_WATCHES)}"
        self._steps, self._looks, self._took = 0, 0, _GUESS
        self._known: list[weakref.ref[Tensor]] = []
        self._told: set[str] = set()
        self._frozen = False
        self._made, self._spent = monotonic(), 0.0
        self.watches_steps = False

    def is_worth_it(self) -> bool:
        """Whether looking once more would leave the time for all looks a small share of that since the beginning."""
        return self._spent <= _SHARE * (monotonic() - self._made)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = monotonic()
        yield
        self._spent += monotonic() - began

    def start(self) -> None:
        """Training begins, or steps are looked at once more."""
        with self._timed():
            self._start()

    def _start(self) -> None:
        self.watches_steps, self._steps = True, 0
        self._nodes, self._plain, self._before = _Series(), _Series(), {}
        if self._looks == 0:
            self._pass_over_earlier_graphs()
        # To a tensor that was there before, `total += loss` gives a graph.
        self._known = [weakref.ref(tensor) for tensor in find_tensors(self._named(), self._keeps, _MOST_KNOWN)]
        if gc.get_freeze_count() == 0:  # otherwise somebody has set objects aside, and wants them to stay there
            gc.freeze()
            self._frozen = True

    def _pass_over_earlier_graphs(self) -> None:
        """Stamps the nodes of graphs that were there before the run, so that they never count as old."""
        with_graph = [thing for thing in gc.get_objects() if type(thing) is Tensor and thing.grad_fn is not None]
        for node in _nodes_of(with_graph):
            node.metadata[self._stamp] = math.inf

    def stop(self) -> None:
        """No more steps are looked at; may be called twice."""
        self.watches_steps = False
        self._origins.stop()
        if self._frozen:
            self._frozen = False
            gc.unfreeze()

    def after_step(self, step: int) -> list[Leak]:
        """Looks after a step of the optimiser.

        Args:
            step: `trainer.global_step`.

        Returns:
            What was found, each once.
        """
        with self._timed():
            return self._after_step(step)

    def _after_step(self, step: int) -> list[Leak]:
        self._steps += 1
        if self._steps <= _WARM_UP:
            return []
        known = [tensor for reference in self._known if (tensor := reference()) is not None]
        alive = self._alive(chain(known, gc.get_objects()))  # a list of both would hold itself
        self._nodes.add(alive.nodes)
        self._plain.add(alive.nbytes)
        leaks = []
        for with_graph, series in ((True, self._nodes), (False, self._plain)):
            enough = with_graph or series.last - series.first >= _MANY_BYTES
            if series.growths == _SUSPICIOUS and with_graph not in self._before:
                self._before[with_graph] = self._sizes(alive, with_graph=with_graph)
                self._origins.start()
            elif series.growths >= _GROWTHS and enough:
                leaks += self._grown(alive, step, with_graph=with_graph)
        calm = self._nodes.growths < _SUSPICIOUS and self._plain.growths < _SUSPICIOUS
        if leaks or self._steps >= (_CALM if calm else _MOST_STEPS):
            self.stop()
        return leaks

    def after_epoch(self, step: int, seconds: float) -> list[Leak]:
        """Looks through everything after an epoch, if that is worth the time.

        Args:
            step: `trainer.global_step`.
            seconds: What the epoch took.
        """
        if self._took > _SHARE * seconds:
            return []
        began = monotonic()
        alive = self._alive(gc.get_objects())
        self._took = monotonic() - began
        self._epochs.add(alive.nodes)
        if self._epochs.growths == _EPOCHS - 1:
            self._before[True] = self._sizes(alive, with_graph=True)
        return self._grown(alive, step, with_graph=True) if self._epochs.growths >= _EPOCHS else []

    def _alive(self, objects: Iterable[object]) -> _Alive:
        """The tensors among all objects; parameters and those of other libraries' kinds left out."""
        self._looks += 1
        tensors = {id(thing): thing for thing in objects if type(thing) is Tensor}.values()
        with_graph = [tensor for tensor in tensors if tensor.grad_fn is not None]
        plain = [tensor for tensor in tensors if tensor.grad_fn is None]
        return _Alive(with_graph, self._count_old(with_graph), plain)

    def _count_old(self, tensors: Iterable[Tensor]) -> int:
        """The nodes that tensors hold of earlier steps; what this step has left is stamped, and may yet go."""
        old = 0
        for node in _nodes_of(tensors):
            seen = node.metadata.setdefault(self._stamp, self._looks)
            old += self._looks - seen >= _OLD
        return old

    # Who it was.

    def _named(self) -> dict[str, object]:
        """What people know by name, but the trainer, which holds everything."""
        return {**{name: root for name, root in self._roots().items() if name != "trainer"}, **globals_of_user()}

    def _holders(self, alive: _Alive, *, with_graph: bool) -> dict[str, list[Tensor]]:
        """The tensors by the path to what keeps them."""
        tensors = (alive.with_graph if with_graph else alive.plain)[-_MOST_TENSORS:]
        keeps = (lambda _: False) if with_graph else self._keeps
        paths = find_holders({id(tensor): tensor for tensor in tensors}, {**self._roots(), **globals_of_user()}, keeps)
        holders: dict[str, list[Tensor]] = {}
        for tensor in tensors:
            if (path := paths.get(id(tensor))) is not None:
                holders.setdefault(_general(path), []).append(tensor)
        return holders

    def _sizes(self, alive: _Alive, *, with_graph: bool) -> dict[str, int]:
        size = self._count_old if with_graph else _bytes
        return {path: size(held) for path, held in self._holders(alive, with_graph=with_graph).items()}

    def _grown(self, alive: _Alive, step: int, *, with_graph: bool) -> list[Leak]:
        before, now = self._before.get(with_graph, {}), monotonic() - self._began
        size = self._count_old if with_graph else _bytes
        holders = self._holders(alive, with_graph=with_graph)
        grown = {path: held for path, held in holders.items() if size(held) > before.get(path, 0)}
        named = {id(tensor) for held in holders.values() for tensor in held}
        lost = [tensor for tensor in alive.with_graph if id(tensor) not in named]
        if not grown and with_graph and self._count_old(lost):  # it is there, whoever keeps it
            grown = {"": lost}
        leaks = [
            Leak(
                holder=path,
                line=next(filter(None, map(self._origins.of, reversed(held))), ""),
                with_graph=with_graph,
                tensors=len(held),
                nodes=self._count_old(held) if with_graph else 0,
                nbytes=_bytes(held),
                step=step,
                seconds=now,
            )
            for path, held in grown.items()
            if path not in self._told
        ]
        self._told |= set(grown)
        return leaks


def _general(path: str) -> str:
    """A path without what tells one element of a container from the next."""
    path = re.sub(r"\[\d+\]", "[…]", path)
    path = re.sub(r"(?<=\[)'[^']*'(?=\])", lambda key: re.sub(r"\d+", "…", key[0]), path)
    return re.sub(r"(\[…\])+$", "", path)


def _nodes_of(tensors: Iterable[Tensor]) -> set[Any]:
    """The nodes of the graphs that tensors hold, up to a bound."""
    seen: set[Any] = set()
    queue: list[Any] = [tensor.grad_fn for tensor in tensors]
    while queue and len(seen) < _MOST_NODES:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue += [following for following, _ in node.next_functions]
    return seen


def _bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors' storages, each counted once."""
    storages = {}
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse, or without memory of its own
            continue
    return sum(storages.values())
