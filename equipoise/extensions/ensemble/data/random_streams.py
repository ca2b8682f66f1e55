"""Random numbers of each member, as a run of its own would draw them.

The first member draws from torch's global generator. Each other one has a stream: the state of that generator in its
own run, which is exchanged for the global state while the member draws. A private generator of the loader is exchanged
in the same way.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["RandomStreams"]

T = TypeVar("T")


class RandomStreams(torch.Generator):
    """The streams of all members but the first.

    It is a generator whose state is that of all streams. So a loader that has it as `generator` lets the trainer save
    and restore the streams with its other generators.

    Args:
        states: The state of each stream.
        seeds: The seed of each stream, for private generators of loaders.

    Attributes:
        is_training: True after the first order of a training was drawn.
    """

    def __new__(cls, states: Sequence[Tensor], seeds: Sequence[int]) -> "RandomStreams":
        """Return an object whose arguments `__init__` takes: those of a generator are others."""
        return super().__new__(cls)

    def __init__(self, states: Sequence[Tensor], seeds: Sequence[int]) -> None:
        self._states = [state.clone() for state in states]
        self._seeds = list(seeds)
        # The state of each stream of the loader's private generator. A saved state always has them: `split_ensemble`
        # tells them from the others by their place.
        self._private_states = [_state_of_seed(seed) for seed in seeds]
        self.is_training = False

    @classmethod
    def seeded(cls, seeds: Sequence[int]) -> "RandomStreams":
        """Return streams that begin with the given seeds."""
        return cls([_state_of_seed(seed) for seed in seeds], seeds)

    def run(self, member: int, function: Callable[[], T], private: torch.Generator | None = None) -> T:
        """Run a function that draws random numbers of a member.

        Args:
            member: The index of the member.
            function: The function.
            private: The loader's private generator, if it draws from that, too.
        """
        if member == 0:
            return function()
        # 1. The member's states.
        index = member - 1
        outer_state = torch.default_generator.get_state()
        torch.default_generator.set_state(self._states[index])
        outer_private_state = None
        if private is not None:
            outer_private_state = private.get_state()
            private.set_state(self._private_state(index))

        # 2. The function, and the states as they were.
        try:
            return function()
        finally:
            self._states[index] = torch.default_generator.get_state()
            torch.default_generator.set_state(outer_state)
            if private is not None and outer_private_state is not None:
                self._private_states[index] = private.get_state()
                private.set_state(outer_private_state)

    def _private_state(self, index: int) -> Tensor:
        """Return the state of a stream of the loader's private generator."""
        if not self._private_states:
            self._private_states = [_state_of_seed(seed) for seed in self._seeds]
        return self._private_states[index]

    def draw(self, function: Callable[[], object]) -> None:
        """Run a function with the numbers of each stream, if a training has begun.

        Args:
            function: Draws what a validation draws in each run.
        """
        if not self.is_training:
            return
        for member in range(1, len(self._states) + 1):
            self.run(member, function)

    def begin_training(self) -> None:
        """Note that an order of a training is drawn."""
        self.is_training = True

    def end_training(self) -> None:
        """Note the end of a run."""
        self.is_training = False

    # As a generator of the loader.

    def get_state(self) -> Tensor:
        """Return the states of all streams, one in each row."""
        return torch.stack([*self._states, *self._private_states])

    def set_state(self, new_state: Tensor) -> "RandomStreams":
        """Restore states that `get_state` returned; those of another number of members are ignored."""
        if new_state.ndim != 2:
            return self
        rows = [row.clone() for row in new_state.unbind()]
        count = len(self._states)
        if len(rows) not in (count, 2 * count):
            return self
        self._states = rows[:count]
        self._private_states = rows[count:]
        return self


def _state_of_seed(seed: int) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator.get_state()
