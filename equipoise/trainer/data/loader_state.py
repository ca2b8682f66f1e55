"""State of loaders for a resumed run: generators, positions, persistent workers, restarts within an epoch."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from equipoise.parallel.snapshot import random_state

__all__ = [
    "PersistentWorkers",
    "Restarts",
    "has_state",
    "load_random_state",
    "random_state_of",
    "separate_workers",
    "separates_workers",
]


# States of generators, as `random_state_of` returns them.
RandomStates = dict[str, Any]
# A function that opens a loader, and one that calls it.
OpenLoader = Callable[[], Any]
Starter = Callable[[OpenLoader], None]


def has_state(loader: Any) -> bool:
    """Return True if a loader saves and restores its position, as torchdata's StatefulDataLoader does."""
    save = getattr(loader, "state_dict", None)
    load = getattr(loader, "load_state_dict", None)
    return callable(save) and callable(load)


def _generators(loaders: list[Any]) -> list[torch.Generator]:
    """Return the private generators of loaders and samplers, once each."""
    generators: dict[int, torch.Generator] = {}
    for loader in loaders:
        sampler = getattr(loader, "sampler", None)
        batch_sampler = getattr(loader, "batch_sampler", None)
        inner_sampler = getattr(batch_sampler, "sampler", None)
        # A generator may be shared between them.
        for owner in (loader, sampler, batch_sampler, inner_sampler):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                generators[id(generator)] = generator
    return list(generators.values())


def random_state_of(loaders: list[Any]) -> RandomStates:
    """Return the states of all generators that the next batches of these loaders depend on."""
    states = [generator.get_state() for generator in _generators(loaders)]
    return {"global": random_state.capture().state_dict(), "generators": states}


def load_random_state(loaders: list[Any], state: RandomStates) -> None:
    """Set the generators back whose states `random_state_of` returned."""
    # There may be fewer loaders now than there were.
    for generator, private_state in zip(_generators(loaders), state["generators"], strict=False):
        generator.set_state(private_state)
    random_state.RandomState.from_state_dict(state["global"]).restore()


def separate_workers(loader: Any, rank: int) -> None:
    """Let the workers of a loader draw other random numbers than those of other processes.

    Workers begin with a number that the loader draws. That is the same in all processes if the loader has a generator
    of its own.

    Args:
        loader: The loader. Where it has a `worker_init_fn`, that decides.
        rank: The rank of this process.
    """
    draws_alike = getattr(loader, "generator", None) is not None and getattr(loader, "num_workers", 0) > 0
    if rank and draws_alike and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(_separate_worker, rank=rank)


def separates_workers(init: Any) -> bool:
    """Return True if a loader's `worker_init_fn` is the one that `separate_workers` sets."""
    return isinstance(init, partial) and init.func is _separate_worker


def _separate_worker(worker: int, rank: int) -> None:
    random_state.fork(rank)


class PersistentWorkers:
    """Workers that the loaders of a stage keep from one pass to the next, and the generators they started with.

    A loader draws the seed of its workers when it starts them. With `persistent_workers=True` it does so in the first
    pass, and not in later ones. The workers of a resumed run start in a later pass. A seed drawn there would move
    every generator on by one number: the sampler would draw another order. So the workers are started with the
    generators of that first pass, which also gives them the same seeds, and the generators are set back.

    Args:
        loaders: The loaders of the stage.
        several_at_once: Whether one stream reads them together.
    """

    def __init__(self, loaders: list[Any], *, several_at_once: bool) -> None:
        self._loaders = loaders
        # For each stream, whether its workers stay between passes.
        self._persists_in_stream = [_keeps_workers(loader) for loader in loaders]
        if several_at_once:
            # The only stream opens all loaders.
            self._persists_in_stream = [any(self._persists_in_stream)]
        # Generators at the start of the workers, by stream: in this process, and in the one that this run resumes.
        self._started: dict[int, RandomStates] = {}
        self._started_earlier: dict[int, RandomStates] = {}

    def starter(self, stream: int) -> Starter | None:
        """Return the function that a stream calls before it opens its loader; None if the loader keeps no workers."""
        if not self._persists_in_stream[stream]:
            return None
        return partial(self._start, stream)

    def _start(self, stream: int, open_loader: OpenLoader) -> None:
        """Start the workers as in an earlier process, or note the generators with which they start now."""
        # 1. Note only the first start: later passes find the workers alive.
        if stream in self._started:
            return
        now = random_state_of(self._loaders)
        earlier = self._started_earlier.pop(stream, None)
        if earlier is None:
            self._started[stream] = now
            return
        # 2. Start them with the earlier generators, and continue with the present ones.
        self._started[stream] = earlier
        load_random_state(self._loaders, earlier)
        open_loader()
        load_random_state(self._loaders, now)

    def forget(self) -> None:
        """Forget the starts, after the workers have ended."""
        self._started.clear()
        self._started_earlier.clear()

    def state_dict(self) -> list[Any]:
        """Return pairs of a stream's index and the generators with which its workers started."""
        starts = {**self._started_earlier, **self._started}
        return [[stream, state] for stream, state in starts.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        """Let workers that do not run yet start as they did in an earlier process."""
        self._started_earlier = dict(state)


def _keeps_workers(loader: Any) -> bool:
    """Return True if a loader keeps its workers between passes, and does not restore their position by itself."""
    if not isinstance(loader, DataLoader):
        return False
    if not loader.persistent_workers:
        return False
    return not has_state(loader)


class Restarts:
    """Generators with which loaders began anew within an epoch, as a shorter one of several does.

    The steps before have drawn numbers, too, which a resumed run does not draw: it sets the generators when it opens
    the loader as often.

    Args:
        loaders: The loaders that are read together.
    """

    def __init__(self, loaders: list[Any]) -> None:
        self._loaders = [_RestartedLoader(loader) for loader in loaders]

    def begin(self) -> list[Any]:
        """Return the loaders as they are opened in a pass."""
        for loader in self._loaders:
            loader.times_opened = 0
        return list(self._loaders)

    def state_dict(self) -> list[Any]:
        """Return the last restart of each loader: its number, from 1, and the generators; empty if there was none."""
        return [loader.last_restart for loader in self._loaders]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Let loaders begin anew as in an earlier process."""
        # There may be fewer loaders now than there were.
        for loader, restart in zip(self._loaders, state, strict=False):
            loader.earlier_restart = restart


class _RestartedLoader:
    """A loader as several that are read together open it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.times_opened = 0
        self.last_restart: list[Any] = []
        self.earlier_restart: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        restart = self.times_opened
        self.times_opened += 1
        if restart:
            if self.earlier_restart and self.earlier_restart[0] == restart:
                random_state.RandomState.from_state_dict(self.earlier_restart[1]).restore()
            self.last_restart = [restart, random_state.capture().state_dict()]
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)
