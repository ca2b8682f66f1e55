"""Capture, restore and separate every random generator that a step can draw from.

These are torch's generators of the CPU, of every CUDA device and of MPS, Python's `random`, and numpy's global
generator. A capture never initialises CUDA and never imports numpy: where they are not in use there is no state.
"""

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise.errors import CheckpointError

__all__ = [
    "HostGenerators",
    "RandomState",
    "SameNumbers",
    "capture",
    "capture_host",
    "drawn_alike",
    "fork",
    "fork_device",
    "isolated",
    "seeded",
]

T = TypeVar("T")

# Numpy takes seeds of 32 bits.
_SEEDS_OF_NUMPY = 2**32
_GENERATORS_OF_NUMPY = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


@dataclass(frozen=True, kw_only=True, eq=False)
class RandomState:
    """The state of every random generator at one moment; see `capture`.

    Attributes:
        cpu: State of torch's generator of the CPU, bytes.
        cuda: States of the generators of the CUDA devices in order. Empty: CUDA was not in use.
        mps: State of the generator of MPS. None: MPS is not available.
        python: State as `random.getstate()` returns it.
        numpy: State as `numpy.random.get_state(legacy=False)` returns it, its arrays as tensors, since a safe reader of
            checkpoints refuses arrays. None: numpy was not in use.

    Example:
        >>> state = capture()
        >>> first = torch.rand(2)
        >>> state.restore()
        >>> torch.equal(first, torch.rand(2))
        True
    """

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    mps: Tensor | None
    python: tuple[int, tuple[int, ...], float | None]
    numpy: dict[str, Any] | None

    def equals(self, other: "RandomState") -> bool:
        """Return True if all generators were in the same states.

        Args:
            other: A state of this process at another moment.
        """
        return _are_equal(self.state_dict(), other.state_dict())

    def restore(self) -> None:
        """Restore every captured generator. Other generators keep their state.

        States of CUDA devices that this machine lacks are ignored. If CUDA is not yet initialised, its generators get
        their state at the initialisation.
        """
        torch.set_rng_state(self.cpu)
        if self.cuda:
            device_count = torch.cuda.device_count()
            for index, state in enumerate(self.cuda[:device_count]):
                torch.cuda.set_rng_state(state, index)
        if self.mps is not None and torch.backends.mps.is_available():
            torch.mps.set_rng_state(self.mps)
        random.setstate(self.python)
        if self.numpy is not None:
            # A resumed run may not have imported it yet.
            numpy_random = import_module("numpy.random")
            numpy_random.set_state(_arrays(self.numpy))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain containers, which `torch.load(weights_only=True)` reads."""
        return {
            "cpu": self.cpu,
            "cuda": list(self.cuda),
            "mps": self.mps,
            "python": self.python,
            "numpy": self.numpy,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "RandomState":
        """Return the state whose `state_dict` this is. Its tensors may be on any device.

        Args:
            state: A return value of `state_dict`.

        Raises:
            CheckpointError: If the state of a generator is missing, or is not valid for that generator.
        """
        missing = [name for name in cls.__dataclass_fields__ if name not in state]
        if missing:
            expected = ", ".join(cls.__dataclass_fields__)
            present = ", ".join(map(str, state)) or "nothing"
            raise CheckpointError(
                f"A random state holds {expected}, but this one lacks {', '.join(missing)} and holds {present}."
                " Use what `RandomState.state_dict` returned."
            )
        try:
            version, words, spare = state["python"]
            cpu = state["cpu"].cpu()
            cuda = [tensor.cpu() for tensor in state["cuda"]]
            mps = state["mps"]
            if mps is not None:
                mps = mps.cpu()
            random_state = cls(
                cpu=cpu,
                cuda=tuple(cuda),
                mps=mps,
                python=(version, tuple(words), spare),
                numpy=state["numpy"],
            )
            random_state._check()
        except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            kind = type(error).__name__
            reason = str(error).rstrip(".")
            raise CheckpointError(f"A random state is damaged: {kind}: {reason}. Take another checkpoint.") from error
        return random_state

    def _check(self) -> None:
        """Set the states of unused generators, which refuse states that are not valid."""
        # The global generators must not change: the state may be damaged.
        torch.Generator().set_state(self.cpu)
        random.Random().setstate(self.python)
        if self.numpy is not None:
            numpy_random = import_module("numpy.random")
            bit_generators = {name: getattr(numpy_random, name) for name in _GENERATORS_OF_NUMPY}
            bit_generator = bit_generators[self.numpy["bit_generator"]]
            numpy_random.RandomState(bit_generator()).set_state(_arrays(self.numpy))
        # This machine may have no such device to try the state.
        device_states = list(self.cuda)
        if self.mps is not None:
            device_states.append(self.mps)
        for state in device_states:
            if state.dtype != torch.uint8 or state.dim() != 1:
                raise TypeError("the state of a generator of a GPU is no sequence of bytes")


def capture() -> RandomState:
    """Capture every random generator in use. Draws from none."""
    cuda: list[Tensor] = []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all()
    mps = None
    if torch.backends.mps.is_available():
        mps = torch.mps.get_rng_state()
    return replace(capture_host(), cuda=tuple(cuda), mps=mps)


def capture_host() -> RandomState:
    """Capture the generators of the CPU, of Python and numpy; those of GPUs are left out."""
    numpy = _numpy_state()
    if numpy is not None:
        numpy = _tensors(numpy)
    return RandomState(
        cpu=torch.get_rng_state(),
        cuda=(),
        mps=None,
        python=random.getstate(),
        numpy=numpy,
    )


def seeded(seed: int) -> RandomState:
    """Return the state of the host's generators after they are seeded with a number. They stay as they are.

    Args:
        seed: The number, from 0.
    """
    numpy_state = None
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy_state = _tensors(numpy.RandomState(seed % _SEEDS_OF_NUMPY).get_state(legacy=False))
    return RandomState(
        cpu=torch.Generator().manual_seed(seed).get_state(),
        cuda=(),
        mps=None,
        python=random.Random(seed).getstate(),
        numpy=numpy_state,
    )


@contextmanager
def isolated() -> Iterator[None]:
    """Restore every random generator at the end of a `with` block, also after an error.

    Later draws are the same as without the block.

    Example:
        >>> with isolated():
        ...     noise = torch.rand(3)
        >>> torch.equal(noise, torch.rand(3))
        True
    """
    state = capture()
    try:
        yield
    finally:
        state.restore()


# Independent sequences


def fork(number: int) -> None:
    """Give all random generators other sequences, which follow from torch's present state on the CPU and a number.

    Processes with equal generators have independent ones after it, if their numbers differ.

    Args:
        number: The number.

    Example:
        >>> state = capture()
        >>> fork(1)
        >>> first = torch.rand(2)
        >>> state.restore()
        >>> fork(2)
        >>> torch.equal(first, torch.rand(2))
        False
    """
    seed = _forked_seed(number)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed % _SEEDS_OF_NUMPY)


def fork_device(device: torch.device, number: int) -> None:
    """Give the generator of a CUDA device another sequence; see `fork`.

    Args:
        device: The device.
        number: The number.
    """
    with torch.cuda.device(device):
        torch.cuda.manual_seed(_forked_seed(number))


def _forked_seed(number: int) -> int:
    """Return a seed of 63 bits that follows from torch's present state on the CPU and a number. Draws nothing."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    drawn = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    digest = hashlib.sha256(f"{drawn}, {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


# The same sequence in all processes


class SameNumbers:
    """The generators of the host in a `with` block: they follow from a seed, and continue where the last block ended.

    After the block the generators are as before it. Those of GPUs stay as they are.

    Args:
        seed: The same number in all processes.

    Example:
        >>> numbers = SameNumbers(1)
        >>> with numbers:
        ...     first = torch.rand(())
        >>> with numbers:
        ...     second = torch.rand(())
        >>> generator = torch.Generator().manual_seed(1)
        >>> torch.equal(torch.stack([first, second]), torch.rand(2, generator=generator))
        True
    """

    def __init__(self, seed: int) -> None:
        self._state = seeded(seed)
        self._state_outside = self._state

    def __enter__(self) -> None:
        self._state_outside = capture_host()
        self._state.restore()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state = capture_host()
        self._state_outside.restore()


def drawn_alike(open_items: Callable[[], Iterator[T]], seed: int) -> Iterator[T]:
    """Return items whose random numbers are the same in all processes.

    Args:
        open_items: Returns the items; called immediately.
        seed: The same number in all processes.
    """
    numbers = SameNumbers(seed)
    with numbers:
        items = open_items()
    return _drawn(items, numbers)


def _drawn(items: Iterator[T], numbers: SameNumbers) -> Iterator[T]:
    while True:
        with numbers:
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
        # Do not hold the item while the next one is drawn.
        del item


# Notes of what was drawn


class HostGenerators:
    """States of the global generators of Python and numpy at one moment. Numpy has none before it is imported.

    Example:
        >>> noted = HostGenerators()
        >>> first = random.random()
        >>> noted.have_moved()
        True
        >>> noted.restore()
        >>> random.random() == first
        True
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def have_moved(self) -> bool:
        """Return True if numbers were drawn since."""
        if random.getstate() != self._python:
            return True
        if self._numpy is None:
            return False
        return not _are_equal(self._numpy, _numpy_state())

    def restore(self) -> None:
        """Restore both."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


# States in plain data


def _numpy_state() -> Any:
    """Return the state of numpy's global generator; None if numpy is not imported."""
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    return numpy.get_state(legacy=False)


def _are_equal(state: Any, present: Any) -> bool:
    """Return True if two states are equal: tensors or arrays, or dictionaries and lists of them."""
    if isinstance(state, dict):
        if not isinstance(present, dict):
            return False
        return all(_are_equal(value, present[name]) for name, value in state.items())
    if isinstance(state, list):
        return len(state) == len(present) and all(map(_are_equal, state, present))
    same = state == present
    # Arrays are compared item by item.
    if hasattr(state, "all"):
        return bool(same.all())
    return bool(same)


def _tensors(value: Any) -> Any:
    """Turn the arrays of a numpy state into tensors."""
    if isinstance(value, dict):
        return {key: _tensors(item) for key, item in value.items()}
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.ndarray):
        return torch.from_numpy(value)
    return value


def _arrays(value: Any) -> Any:
    """Turn tensors back into arrays."""
    if isinstance(value, dict):
        return {key: _arrays(item) for key, item in value.items()}
    if isinstance(value, Tensor):
        return value.cpu().numpy()
    return value
