"""Activation checkpointing: submodules compute their activations again in the backward.

The second forward must do the same as the first, and change nothing. Random numbers are drawn again from the state at
the beginning of the first, buffers such as BatchNorm's statistics have the values from that time, and all changes are
undone (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
"""

import difflib
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
from equipoise.interop.torch.modules import buffers_of
from equipoise.parallel.snapshot.attributes import Attributes
from equipoise.parallel.snapshot.buffers import NotedBuffer, note_buffers
from equipoise.parallel.snapshot.random_state import HostGenerators

__all__ = ["checkpoint_activations", "is_checkpointed", "keep_activations"]

# The attribute in which a module keeps a forward that was an attribute of its own before.
_ORIGINAL_FORWARD = "forward_without_checkpoint"


def checkpoint_activations(module: nn.Module, patterns: Sequence[str | type[nn.Module]]) -> list[str]:
    """Let submodules compute their activations again in the backward instead of keeping them.

    Gradients, buffers and random numbers are the same to the bit. Parameters keep their names, and without gradients
    nothing changes. If a chosen submodule contains another, only the outer one is used. Containers without a forward,
    such as `nn.ModuleList`, are not chosen, but their items are.

    Args:
        module: The module.
        patterns: Names of submodules, patterns of them, in which * stands for anything, dots included, or classes of
            submodules, of which the module may have none.

    Returns:
        The names of the submodules.

    Raises:
        ConfigurationError: If a pattern matches nothing, or a submodule that cannot be computed twice.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
        >>> checkpoint_activations(model, ["1*"])
        ['1']
        >>> keep_activations(model)
    """
    # 1. The submodules that the patterns match.
    submodules = dict(module.named_modules(remove_duplicate=False))
    # The module itself.
    submodules.pop("", None)
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        matches = _matches(pattern, submodules)
        # A list of classes may be that of a library, for all of its networks.
        if not matches and isinstance(pattern, str):
            raise ConfigurationError(_no_match(module, pattern, submodules))
        chosen |= matches

    # 2. The outermost of them, all checked before the first is changed.
    outermost = [name for name in chosen if not any(name.startswith(f"{outer}.") for outer in chosen)]
    for name in outermost:
        _check(name, chosen[name])
    for name in outermost:
        _replace_forward(chosen[name])
    return outermost


def keep_activations(module: nn.Module) -> None:
    """Undo `checkpoint_activations`.

    Args:
        module: The module.
    """
    for part in module.modules():
        if not is_checkpointed(part):
            continue
        attributes = vars(part)
        del attributes["forward"]
        if _ORIGINAL_FORWARD in attributes:
            attributes["forward"] = attributes.pop(_ORIGINAL_FORWARD)


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether a module computes its activations twice."""
    return getattr(vars(module).get("forward"), "__func__", None) is _forward


def _matches(pattern: str | type[nn.Module], submodules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the submodules with a forward whose names match a pattern, or which are of a class."""
    matches = {}
    for name, submodule in submodules.items():
        is_match = fnmatchcase(name, pattern) if isinstance(pattern, str) else isinstance(submodule, pattern)
        if is_match and _has_forward(submodule):
            matches[name] = submodule
    return matches


def _has_forward(module: nn.Module) -> bool:
    if "forward" in vars(module):
        return True
    return type(module).forward is not nn.Module.forward


def _replace_forward(module: nn.Module) -> None:
    if is_checkpointed(module):
        return
    attributes = vars(module)
    if "forward" in attributes:
        attributes[_ORIGINAL_FORWARD] = attributes["forward"]
    # A bound method, which copies of the module bind to themselves.
    attributes["forward"] = MethodType(_forward, module)


def _no_match(module: nn.Module, pattern: str, submodules: dict[str, nn.Module]) -> str:
    """Return the message for a pattern that matches nothing, with names like it."""
    names = [name for name, submodule in submodules.items() if _has_forward(submodule)]
    nearest = difflib.get_close_matches(pattern.replace("*", ""), names, 3) or names[:5]
    hint = " It has none."
    if nearest:
        hint = f" The nearest: {', '.join(nearest)}."
    kind = type(module).__name__
    return f"activation_checkpointing: {pattern!r} matches no submodule of {kind} with a forward.{hint}"


def _check(name: str, module: nn.Module) -> None:
    """Refuse submodules that cannot be computed twice."""
    for part in module.modules():
        if isinstance(part, Metric):
            raise ConfigurationError(
                f"activation_checkpointing: {name!r} holds a metric, which would see every batch twice. Name submodules"
                " that hold none."
            )
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigurationError(
            f"activation_checkpointing: {name!r} is a scripted module, whose forward cannot be exchanged. Name another."
        )


# The two forwards.


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward under torch's checkpoint. Replaces the forward."""
    original = vars(self).get(_ORIGINAL_FORWARD)
    if original is None:
        original = MethodType(type(self).forward, self)
    if not torch.is_grad_enabled():
        return original(*args, **kwargs)
    start = _ForwardStart(self)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return start.first_forward(), start.second_forward()

    # Torch looks for devices, whose generators it keeps, among positional arguments only. So the keyword arguments are
    # passed as one.
    def compute(args: Any, kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return checkpoint(compute, args, kwargs, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)


# The name by which a bound method is pickled.
_forward.__name__ = "forward"


class _ForwardStart:
    """State at the beginning of a forward, as far as the forward changes it. Torch keeps its own generators."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        # The buffers that the first forward changes, as they were.
        self._changed_buffers: list[NotedBuffer] = []
        # The generators at the beginning; None if the first forward draws nothing from them.
        self._generators: HostGenerators | None = None

    @contextmanager
    def first_forward(self) -> Iterator[None]:
        """Note the state that changes in a `with` block that runs the first forward."""
        # 1. The state before.
        noted: list[NotedBuffer] = []
        for part in self._parts:
            noted.extend(note_buffers(part))
        generators = HostGenerators()
        yield

        # 2. The part of it that has changed. BatchNorm changes its statistics without a change of their versions, but
        #    computes nothing from them.
        self._changed_buffers = [buffer for buffer in noted if buffer.has_changed()]
        self._generators = None
        if generators.have_moved():
            self._generators = generators

    @contextmanager
    def second_forward(self) -> Iterator[None]:
        """Restore the noted state for a `with` block that runs the second forward, and undo all its changes."""
        # 1. The state before.
        attributes = Attributes(self._parts)
        buffers = Attributes(self._parts, buffers_of)
        attributes.mark()
        buffers.mark()
        generators = HostGenerators()
        try:
            # 2. The state at the beginning of the first forward, in copies.
            for part in self._parts:
                registered = buffers_of(part)
                for name, buffer in registered.items():
                    registered[name] = _copy(buffer)
            for changed in self._changed_buffers:
                registered = buffers_of(changed.module)
                registered[changed.name] = _copy(changed.values)
            if self._generators is not None:
                self._generators.restore()
            yield
        finally:
            # 3. The state before is restored.
            attributes.restore()
            buffers.restore()
            if self._generators is not None:
                generators.restore()


def _copy(buffer: Tensor | None) -> Tensor | None:
    if buffer is None:
        return None
    return buffer.detach().clone()
