"""State of loaders for a resumed run: generators, positions, persistent workers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from equipoise.parallel.snapshot import random_state

__all__ = [
    "PersistentWorkers",
    "generator_states",
    "has_state",
    "load_generator_states",
    "load_random_state",
    "random_state_of",
]


def has_state(loader: Any) -> bool:
    """Return True if a loader saves and restores its position, as torchdata's StatefulDataLoader does."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _generators(loaders: list[Any]) -> list[torch.Generator]:
    """The generators that loaders and samplers hold for themselves, once each."""
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        batch_sampler = getattr(loader, "batch_sampler", None)
        for holder in (
            loader,
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        ):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())


def generator_states(loaders: list[Any]) -> list[torch.Tensor]:
    """The states of the generators that loaders and samplers hold for themselves."""
    return [generator.get_state() for generator in _generators(loaders)]


def load_generator_states(loaders: list[Any], states: list[torch.Tensor]) -> None:
    """Sets those generators back."""
    for generator, state in zip(_generators(loaders), states, strict=False):
        generator.set_state(state)


def random_state_of(loaders: list[Any]) -> dict[str, Any]:
    """Every generator that the next batches of these loaders depend on."""
    return {"global": random_state.capture().state_dict(), "generators": generator_states(loaders)}


def load_random_state(loaders: list[Any], state: dict[str, Any]) -> None:
    """Sets these generators back.

    Args:
        loaders: The loaders.
        state: What `random_state_of` returned.
    """
    load_generator_states(loaders, state["generators"])
    random_state.RandomState.from_state_dict(state["global"]).restore()


class PersistentWorkers:
    """The workers that the loaders of a stage keep from one pass to the next, and the generators they started with.

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
        kept = [isinstance(each, DataLoader) and each.persistent_workers and not has_state(each) for each in loaders]
        self._kept_by_stream = [any(kept)] if several_at_once else kept
        self._started: dict[int, dict[str, Any]] = {}
        self._earlier: dict[int, dict[str, Any]] = {}

    def starter(self, stream: int) -> Callable[[Callable[[], Any]], None] | None:
        """What a stream calls before it opens its loader; None if the loader keeps no workers.

        Args:
            stream: The index of the stream.
        """
        return partial(self._start, stream) if self._kept_by_stream[stream] else None

    def _start(self, stream: int, open_loader: Callable[[], Any]) -> None:
        """Starts the workers as in an earlier process, or notes the generators with which they start now."""
        if stream in self._started:
            return
        now = random_state_of(self._loaders)
        earlier = self._earlier.pop(stream, None)
        self._started[stream] = now if earlier is None else earlier
        if earlier is None:
            return
        load_random_state(self._loaders, earlier)
        open_loader()
        load_random_state(self._loaders, now)

    def forget(self) -> None:
        """The workers have ended."""
        self._started.clear()
        self._earlier.clear()

    def state_dict(self) -> list[Any]:
        """The generators of each start, by stream."""
        return [[stream, state] for stream, state in {**self._earlier, **self._started}.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        """Lets workers that do not run yet start as they did in an earlier process.

        Args:
            state: What `state_dict` returned.
        """
        self._earlier = dict(state)
