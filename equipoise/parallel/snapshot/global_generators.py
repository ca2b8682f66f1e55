"""Snapshots of the global generators, for every step: Python's and numpy's are read only if they have moved.

Reading the state of Python's Mersenne twister takes 9 µs, and of numpy's 35 µs: together a sixth of a small network's
whole step. So they are read again only if the generator's memory has changed.
"""

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

__all__ = ["GlobalGenerators", "GlobalTwister", "numpy_twister", "python_twister"]

# Words of a Mersenne twister: its state of 624, and a position.
_WORDS = 625


class GlobalGenerators:
    """Notes the global generators of torch, Python and numpy, and restores them.

    Args:
        devices: The devices whose generators are noted, beside that of the CPU.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        cuda_indices = set()
        for device in devices:
            if device.type == "cuda":
                cuda_indices.add(device.index or 0)
        self._cuda = sorted(cuda_indices)
        self._python = python_twister()
        self._bit_generator, self._numpy = numpy_twister()

    def mark(self) -> None:
        """Note the present states."""
        self._cpu_state = torch.get_rng_state()
        self._cuda_states = [torch.cuda.get_rng_state(index) for index in self._cuda]
        self._python.mark()
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            # It may have been imported or exchanged since.
            if numpy.get_bit_generator() is not self._bit_generator:
                self._bit_generator, self._numpy = numpy_twister()
            self._numpy.mark()

    def restore(self) -> None:
        """Restore the states at the last mark."""
        torch.set_rng_state(self._cpu_state)
        cuda_states = zip(self._cuda, self._cuda_states, strict=True)
        for index, state in cuda_states:
            torch.cuda.set_rng_state(state, index)
        random.setstate(self._python.state)
        if self._numpy.state is not None:
            numpy: Any = sys.modules["numpy.random"]
            if numpy.get_bit_generator() is not self._bit_generator:
                numpy.set_bit_generator(self._bit_generator)
            numpy.set_state(self._numpy.state)


class GlobalTwister:
    """A global Mersenne twister, whose state is read only if its memory has changed.

    A draw moves the position. After 624 draws the position may be the same again, but all words have other values. So
    the position and two words show a change. They are in one or two cache lines; the state is in forty.

    Args:
        address: The address of its 625 words. 0: unknown, so the state is always read.
        position: The index of the position among them. The other words are the state.
        read: Returns the state.
        has_spare: Returns whether a state includes a number that was drawn in advance.

    Attributes:
        state: The state at the last mark; None before the first.
    """

    def __init__(
        self,
        address: int,
        position: int,
        read: Callable[[], Any],
        has_spare: Callable[[Any], bool],
    ) -> None:
        self._read = read
        self._has_spare = has_spare
        self._words: Any = None
        if address:
            array_type = ctypes.c_uint32 * _WORDS
            self._words = array_type.from_address(address)
        # The position is the first or the last word; the watched words are the first two of the others.
        self._position = position
        self._first_word = 0
        if position == 0:
            self._first_word = 1
        self._second_word = self._first_word + 1
        self._last_values: tuple[int, ...] = ()
        self._spare = True
        self.state: Any = None

    def mark(self) -> None:
        """Note the state."""
        words = self._words
        values: tuple[int, ...] = ()
        if words is not None:
            values = (words[self._position], words[self._first_word], words[self._second_word])
        # A number that was drawn in advance may be used up without a change of the words.
        if not values or values != self._last_values or self._spare:
            self._last_values = values
            self.state = self._read()
            self._spare = self._has_spare(self.state)


def python_twister() -> GlobalTwister:
    """Return the twister of `random`."""
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    # The object has its position and its words right after the header of every object.
    header_size = object.__basicsize__
    words_size = 4 * _WORDS
    address = id(generator) + header_size
    *words, position = generator.getstate()[1]
    if generator.__sizeof__() >= header_size + words_size:
        memory = ctypes.string_at(address, words_size)
        expected = struct.pack("=I624I", position, *words)
        if memory != expected:
            # Another version of Python has another layout.
            address = 0
    else:
        address = 0
    return GlobalTwister(address, 0, random.getstate, _python_state_has_spare)


def _python_state_has_spare(state: Any) -> bool:
    _, _, spare = state
    return spare is not None


def numpy_twister() -> tuple[Any, GlobalTwister]:
    """Return the bit generator of numpy's global functions, and its twister. None: numpy is not imported."""
    module: Any = sys.modules.get("numpy.random")
    if module is None:
        return None, GlobalTwister(0, 0, dict, bool)
    generator = module.get_bit_generator()
    address = 0
    if type(generator).__name__ == "MT19937":
        address = generator.ctypes.state_address
    read = partial(module.get_state, legacy=False)
    return generator, GlobalTwister(address, _WORDS - 1, read, _numpy_state_has_spare)


def _numpy_state_has_spare(state: Any) -> bool:
    return bool(state.get("has_gauss"))
