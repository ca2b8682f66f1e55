"""Capture and restore every random generator that a step can draw from.

Torch's generators of the CPU, of every CUDA device and of MPS, Python's `random`, and numpy's global generator. What a
process has not begun to use is left alone: CUDA is never initialised and numpy never imported in order to look at it.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import CheckpointError

__all__ = ["RandomState", "capture", "isolated"]

_GENERATORS_OF_NUMPY = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


@dataclass(frozen=True, kw_only=True, eq=False)
class RandomState:
    """The state of every random generator at one moment; see `capture`.

    Attributes:
        cpu: Torch's generator, bytes.
        cuda: The generators of the CUDA devices in order; empty where CUDA was not in use.
        mps: The generator of MPS; None where there is none.
        python: What `random.getstate()` returns.
        numpy: What `numpy.random.get_state(legacy=False)` returns, its arrays as tensors, since a safe reader of
            checkpoints refuses arrays; None where numpy was not in use.

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

    def restore(self) -> None:
        """Puts every captured generator back; one that was not captured keeps its state.

        States of CUDA devices that this machine lacks are passed over. Where CUDA is not yet initialised its generators
        get their state when it is.
        """
        torch.set_rng_state(self.cpu)
        if self.cuda:
            for index, state in enumerate(self.cuda[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, index)
        if self.mps is not None and torch.backends.mps.is_available():
            torch.mps.set_rng_state(self.mps)
        random.setstate(self.python)
        if self.numpy is not None:
            # A resumed run may not have come to the import yet.
            import_module("numpy.random").set_state(_arrays(self.numpy))

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain containers only, so that `torch.load(weights_only=True)` reads it."""
        return {
            "cpu": self.cpu,
            "cuda": list(self.cuda),
            "mps": self.mps,
            "python": self.python,
            "numpy": self.numpy,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "RandomState":
        """Makes a state from what `state_dict` returned, wherever its tensors were loaded to.

        Raises:
            CheckpointError: If a generator's state is missing, or is none of that generator.
        """
        missing = [name for name in cls.__dataclass_fields__ if name not in state]
        if missing:
            raise CheckpointError(
                f"A random state holds {', '.join(cls.__dataclass_fields__)}, but this one lacks {', '.join(missing)}"
                f" and holds {', '.join(map(str, state)) or 'nothing'}. Use what `RandomState.state_dict` returned."
            )
        try:
            version, words, spare = state["python"]
            made = cls(
                cpu=state["cpu"].cpu(),
                cuda=tuple(tensor.cpu() for tensor in state["cuda"]),
                mps=None if state["mps"] is None else state["mps"].cpu(),
                python=(version, tuple(words), spare),
                numpy=state["numpy"],
            )
            made._try()
        except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"A random state is damaged: {type(error).__name__}: {str(error).rstrip('.')}. Take another checkpoint."
            ) from error
        return made

    def _try(self) -> None:
        """Give the states to generators that nobody uses, which refuse what is no state of theirs."""
        torch.Generator().set_state(self.cpu)
        random.Random().setstate(self.python)
        if self.numpy is not None:
            of_numpy = import_module("numpy.random")
            kinds = {kind: getattr(of_numpy, kind) for kind in _GENERATORS_OF_NUMPY}
            of_numpy.RandomState(kinds[self.numpy["bit_generator"]]()).set_state(_arrays(self.numpy))
        others = [*self.cuda, *([] if self.mps is None else [self.mps])]
        if any(state.dtype != torch.uint8 or state.dim() != 1 for state in others):
            raise TypeError("the state of a generator of a GPU is no sequence of bytes")


def capture() -> RandomState:
    """Captures every random generator in use; draws from none."""
    numpy_random = sys.modules.get("numpy.random")
    return RandomState(
        cpu=torch.get_rng_state(),
        cuda=tuple(torch.cuda.get_rng_state_all()) if _cuda_in_use() else (),
        mps=torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
        python=random.getstate(),
        numpy=None if numpy_random is None else _tensors(numpy_random.get_state(legacy=False)),
    )


@contextmanager
def isolated() -> Iterator[None]:
    """What is drawn inside is undone at the end, also by an error: whoever draws afterwards sees nothing of it.

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


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> Any:
    """Turns the arrays of a numpy state into tensors."""
    if isinstance(value, dict):
        return {key: _tensors(item) for key, item in value.items()}
    return torch.from_numpy(value) if isinstance(value, sys.modules["numpy"].ndarray) else value


def _arrays(value: Any) -> Any:
    """Turns tensors back into arrays."""
    if isinstance(value, dict):
        return {key: _arrays(item) for key, item in value.items()}
    return value.cpu().numpy() if isinstance(value, Tensor) else value
