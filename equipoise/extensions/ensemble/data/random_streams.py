"""Random numbers of each member, as a run of its own would draw them.

The first member draws from torch's global generator. Each other one has a stream: the state of that generator in its
own run, which is exchanged for the global state while the member draws. Private generators of loaders are exchanged in
the same way.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["LoaderStreams", "RandomStreams"]

T = TypeVar("T")


class RandomStreams:
    """The streams of all members but the first.

    Args:
        states: The state of each stream.
        seeds: The seed of each stream, with which private generators of loaders begin.
    """

    def __init__(self, states: Sequence[Tensor], seeds: Sequence[int]) -> None:
        self._states = [state.clone() for state in states]
        self._seeds = list(seeds)
        # The states of the members but the first, for each private generator; torch 2.11 has no weak references to it.
        self._private_states: dict[torch.Generator, list[Tensor]] = {}
        # Those with which a training begins: the sanity check before it leaves the numbers as they were.
        self._initial_states: list[Tensor] | None = None

    @classmethod
    def seeded(cls, seeds: Sequence[int]) -> "RandomStreams":
        """Return streams that begin with the given seeds."""
        return cls([_state_of_seed(seed) for seed in seeds], seeds)

    def run(self, member: int, function: Callable[[], T], private: Sequence[torch.Generator] = ()) -> T:
        """Run a function that draws random numbers of a member.

        Args:
            member: The index of the member.
            function: The function.
            private: Private generators of a loader, if it may draw from those, too.
        """
        if member == 0:
            return function()
        index = member - 1
        pairs = [(torch.default_generator, self._states)]
        for generator in private:
            pairs.append((generator, self.private_states(generator)))
        # 1. The member's states.
        outer_states = []
        for generator, states in pairs:
            outer_states.append(generator.get_state())
            generator.set_state(states[index])
        # 2. The function, and the states as they were.
        try:
            return function()
        finally:
            for (generator, states), outer_state in zip(pairs, outer_states, strict=True):
                states[index] = generator.get_state()
                generator.set_state(outer_state)

    def private_states(self, generator: torch.Generator) -> list[Tensor]:
        """Return the states of a private generator in the members but the first."""
        if generator not in self._private_states:
            self._private_states[generator] = [_state_of_seed(seed) for seed in self._seeds]
        return self._private_states[generator]

    def begin_run(self) -> None:
        """Note the states with which a training of this run begins."""
        self._initial_states = list(self._states)

    def begin_training(self) -> None:
        """Restore these states, if the training begins only now."""
        if self._initial_states is not None:
            self._states = self._initial_states
            self._initial_states = None

    def get_state(self) -> Tensor:
        """Return the states of all streams, one in each row: before a training those with which it begins."""
        return torch.stack(self._initial_states or self._states)

    def set_state(self, state: Tensor) -> None:
        """Restore states that `get_state` returned."""
        self._states = [row.clone() for row in state.unbind()[: len(self._seeds)]]
        if self._initial_states is not None:
            self.begin_run()


class LoaderStreams(torch.Generator):
    """The streams as a generator of a loader, whose state the trainer saves and restores with other generators.

    Args:
        streams: The streams.
        private: The private generators of the loader.
    """

    def __new__(cls, streams: RandomStreams, private: Sequence[torch.Generator]) -> "LoaderStreams":
        """Return an object whose arguments `__init__` takes: those of a generator are others."""
        return super().__new__(cls)

    def __init__(self, streams: RandomStreams, private: Sequence[torch.Generator]) -> None:
        self._streams = streams
        self._private = private

    def get_state(self) -> Tensor:
        """Return the states of all streams, one in each row, then those of each private generator."""
        private = [torch.stack(self._streams.private_states(generator)) for generator in self._private]
        return torch.cat([self._streams.get_state(), *private])

    def set_state(self, new_state: Tensor) -> "LoaderStreams":
        """Restore states that `get_state` returned; that of a run without members is ignored."""
        if new_state.ndim != 2:
            return self
        self._streams.set_state(new_state)
        count = len(self._streams.get_state())
        blocks = torch.split(new_state, count)[1:]
        # There may be fewer generators now than there were.
        for generator, block in zip(self._private, blocks, strict=False):
            self._streams.private_states(generator)[:] = [row.clone() for row in block.unbind()]
        return self


def _state_of_seed(seed: int) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator.get_state()
