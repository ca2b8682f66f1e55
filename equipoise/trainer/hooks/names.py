"""Warn of mistyped hooks: methods named `on_...` that nothing calls."""

import inspect
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule, LightningModule

from equipoise.callbacks.callback import Callback
from equipoise.notices import warn_of_method

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["warn_of_mistyped_hooks"]

_NEAR = 0.75  # of `difflib`: how alike two names are, from 0 to 1
_INSTALLED = ("site-packages", "dist-packages")  # code that the user did not write


def warn_of_mistyped_hooks(context: "RunContext") -> None:
    """Warn of methods that look like a hook, in the module, the data module and the callbacks of a run.

    A method that the classes call themselves, or that resembles no hook, is a method of the user's own.

    Args:
        context: The run.
    """
    owners: list[tuple[Any, type]] = [(context.module, LightningModule)]
    if context.datamodule is not None:
        owners.append((context.datamodule, LightningDataModule))
    owners += [(callback, Callback) for callback in context.trainer.callbacks]
    suspects = [found for owner, base in owners for found in _unknown(type(owner), base)]
    if not suspects:
        return
    called = set(_names_in(type(owner) for owner, _ in owners))
    for kind, base, method in suspects:
        known = _hooks(base)
        near = get_close_matches(method.__name__, known, n=1, cutoff=_NEAR)
        if near and method.__name__ not in called:
            warn_of_method(
                method,
                f"`{kind.__name__}.{method.__name__}` is called by no trainer, because no hook has that name; did you"
                f" mean `{near[0]}`? If it is a method of your own, which you call from another file, ignore this"
                " warning, or let the name begin with an underscore.",
            )


def _unknown(kind: type, base: type) -> Iterator[tuple[type, type, FunctionType]]:
    """Yield the methods of a class that are named like a hook and are none."""
    for name, method in _methods_of_user(kind):
        inherited = any(name in vars(parent) for parent in kind.__mro__ if not _is_users(parent))
        if name.startswith("on_") and not inherited and not hasattr(base, name):
            yield kind, base, method


def _methods_of_user(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for parent in kind.__mro__:
        if _is_users(parent):
            yield from ((name, value) for name, value in vars(parent).items() if isinstance(value, FunctionType))


def _is_users(kind: type) -> bool:
    """Return whether the user has written a class: it has functions, and none of them lies in an installed package."""
    if kind.__module__.partition(".")[0] in ("builtins", "equipoise"):
        return False
    functions = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
    return not any(part in function.__code__.co_filename for function in functions for part in _INSTALLED)


def _hooks(base: type) -> list[str]:
    return [name for name in dir(base) if name.startswith("on_")]


def _names_in(kinds: Iterable[type]) -> Iterator[str]:
    """Yield every name that the functions of classes use, and those of the files in which the classes stand."""
    for kind in kinds:
        for _, method in _methods_of_user(kind):
            yield from _names_of(method.__code__)
            for value in list(method.__globals__.values()):
                if isinstance(value, FunctionType) and value.__globals__ is method.__globals__:
                    yield from _names_of(value.__code__)


def _names_of(code: CodeType) -> Iterator[str]:
    """Yield the names and texts in a piece of code; a text may be what `getattr` is given."""
    if code.co_flags & inspect.CO_OPTIMIZED:  # else the body of a class, whose names are those it defines
        yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_of(constant)
