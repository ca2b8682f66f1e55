"""Activation checkpointing: submodules compute their activations again in the backward.

The second forward must do what the first did, and leave no trace of its own: random numbers are drawn again from where
the first began, buffers such as BatchNorm's statistics are those it began with, and what it changes is forgotten
(Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
"""

import difflib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric

from equipoise.errors import ConfigurationError
from equipoise.interop.torch.modules import buffers_of, versions

__all__ = ["checkpoint_activations", "is_checkpointed", "keep_activations"]

_OWN = "forward_without_checkpoint"  # where a forward that the module itself had as an attribute waits


def checkpoint_activations(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Lets submodules compute their activations again in the backward instead of keeping them.

    Gradients, buffers and random numbers are the same to the bit. Parameters keep their names, and where no gradients
    are computed nothing is different. Of submodules that lie in one another the outermost is meant; containers without
    a forward, such as `nn.ModuleList`, are passed over in favour of what is in them.

    Args:
        module: The module.
        patterns: Names of submodules, or patterns of them, in which * stands for anything, dots included.

    Returns:
        The names of the submodules.

    Raises:
        ConfigurationError: If a pattern matches nothing, or something that cannot be computed twice.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
        >>> checkpoint_activations(model, ["1*"])
        ['1']
        >>> keep_activations(model)
    """
    chosen: dict[str, nn.Module] = {}
    parts = {name: part for name, part in module.named_modules(remove_duplicate=False) if name}
    for pattern in patterns:
        matching = [name for name, part in parts.items() if fnmatchcase(name, pattern) and _has_forward(part)]
        if not matching:
            raise ConfigurationError(_nothing(module, pattern, parts))
        chosen |= {name: parts[name] for name in matching}
    outermost = [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]
    for name in outermost:
        _check(name, chosen[name])
    for name in outermost:
        if not is_checkpointed(part := chosen[name]):
            state = vars(part)
            if "forward" in state:
                state[_OWN] = state["forward"]
            state["forward"] = MethodType(_forward, part)  # of which a copy of the module makes its own
    return outermost


def keep_activations(module: nn.Module) -> None:
    """Takes back what `checkpoint_activations` did.

    Args:
        module: The module.
    """
    for part in module.modules():
        if is_checkpointed(part):
            state = vars(part)
            del state["forward"]
            if _OWN in state:
                state["forward"] = state.pop(_OWN)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether a module computes its activations twice."""
    return getattr(vars(module).get("forward"), "__func__", None) is _forward


def _has_forward(part: nn.Module) -> bool:
    return type(part).forward is not nn.Module.forward or "forward" in vars(part)


def _nothing(module: nn.Module, pattern: str, parts: dict[str, nn.Module]) -> str:
    """That a pattern matches nothing, and what is near."""
    names = [name for name, part in parts.items() if _has_forward(part)]
    near = difflib.get_close_matches(pattern.replace("*", ""), names, 3) or names[:5]
    hint = f" The nearest: {', '.join(near)}." if near else " It has none."
    return (
        f"activation_checkpointing: {pattern!r} matches no submodule of {type(module).__name__} with a forward.{hint}"
    )


def _check(name: str, part: nn.Module) -> None:
    if any(isinstance(below, Metric) for below in part.modules()):
        raise ConfigurationError(
            f"activation_checkpointing: {name!r} holds a metric, which would see every batch twice. Name submodules"
            " that hold none."
        )
    if isinstance(part, torch.jit.ScriptModule):
        raise ConfigurationError(
            f"activation_checkpointing: {name!r} is a scripted module, whose forward cannot be exchanged. Name another."
        )


# The two forwards.


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands in the place of a module's forward."""
    own = vars(self).get(_OWN)
    if own is None:
        own = MethodType(type(self).forward, self)
    if not torch.is_grad_enabled():
        return own(*args, **kwargs)
    beginning = _Beginning(self)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return beginning.first(), beginning.again()

    def compute(args: Any, kwargs: Any) -> Any:
        return own(*args, **kwargs)

    # All arguments in two: torch looks for devices, whose generators it keeps, among those without a name only.
    return checkpoint(compute, args, kwargs, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)


_forward.__name__ = "forward"  # by which a bound method is pickled


class _Beginning:
    """What a forward began with, as far as it has changed it; torch itself keeps its own generators."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        self._changed: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
        self._python: Any = None
        self._numpy: Any = None

    @contextmanager
    def first(self) -> Iterator[None]:
        """The forward that counts. What it leaves as it was need not be kept."""
        held = [(own, name, buffer) for own in map(buffers_of, self._parts) for name, buffer in own.items()]
        before = [(_version(buffer), _copy(buffer)) for _, _, buffer in held]
        python, numpy = random.getstate(), _numpy_state()
        yield
        # BatchNorm changes its statistics without a trace in their version, but computes nothing from them.
        self._changed = [
            (own, name, copied)
            for (own, name, buffer), (version, copied) in zip(held, before, strict=True)
            if own.get(name) is not buffer or _version(buffer) != version
        ]
        self._python = python if random.getstate() != python else None
        self._numpy = numpy if numpy is not None and not _alike(numpy, _numpy_state()) else None

    @contextmanager
    def again(self) -> Iterator[None]:
        """The forward for the backward: with copies of the buffers, and without a trace in attributes."""
        attributes = [(part, dict(vars(part))) for part in self._parts]
        buffers = [(own, dict(own)) for own in map(buffers_of, self._parts)]
        python, numpy = random.getstate(), _numpy_state()
        try:
            for own, before in buffers:
                own.update({name: _copy(buffer) for name, buffer in before.items()})
            for own, name, buffer in self._changed:
                own[name] = _copy(buffer)
            if self._python is not None:
                random.setstate(self._python)
            if self._numpy is not None:
                sys.modules["numpy.random"].set_state(self._numpy)
            yield
        finally:
            for own, before in buffers:
                own.clear()
                own.update(before)
            for part, was in attributes:
                vars(part).clear()
                vars(part).update(was)
            if self._python is not None:
                random.setstate(python)
            if self._numpy is not None:
                sys.modules["numpy.random"].set_state(numpy)


def _version(buffer: Tensor | None) -> Any:
    return None if buffer is None else versions([buffer])


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _numpy_state() -> Any:
    numpy: Any = sys.modules.get("numpy.random")
    return None if numpy is None else numpy.get_state(legacy=False)


def _alike(one: Any, other: Any) -> bool:
    """Whether two states of numpy's generator are the same."""
    if isinstance(one, dict):
        return all(_alike(value, other[name]) for name, value in one.items())
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)
