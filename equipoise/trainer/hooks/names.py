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

# Smallest similarity of a mistyped name to a hook, a ratio of `difflib` from 0 to 1.
_MIN_SIMILARITY = 0.75
# Folders of installed packages, whose code the user did not write.
_INSTALLED = ("site-packages", "dist-packages")


def warn_of_mistyped_hooks(context: "RunContext") -> None:
    """Warn of methods that look like a hook, in the module, the data module and the callbacks of a run.

    A method that the classes call themselves, or that resembles no hook, is a method of the user's own.

    Args:
        context: The run.
    """
    # 1. Find methods that look like a hook and are none.
    owners: list[tuple[Any, type]] = [(context.module, LightningModule)]
    if context.datamodule is not None:
        owners.append((context.datamodule, LightningDataModule))
    owners += [(callback, Callback) for callback in context.state.callbacks]
    suspects: list[tuple[type, type, FunctionType]] = []
    for owner, base in owners:
        suspects += _unknown_hooks(type(owner), base)
    if not suspects:
        return
    # 2. Leave out methods that the user's code calls, and warn of the others.
    kinds = [type(owner) for owner, _ in owners]
    used_names = set(_names_in(kinds))
    for kind, base, method in suspects:
        is_called = method.__name__ in used_names
        hooks = _hooks(base)
        similar = get_close_matches(method.__name__, hooks, n=1, cutoff=_MIN_SIMILARITY)
        if similar and not is_called:
            warn_of_method(
                method,
                f"`{kind.__name__}.{method.__name__}` is called by no trainer, because no hook has that name; did you"
                f" mean `{similar[0]}`? If it is a method of your own, which you call from another file, ignore this"
                " warning, or let the name begin with an underscore.",
            )


def _unknown_hooks(kind: type, base: type) -> Iterator[tuple[type, type, FunctionType]]:
    """Yield the methods of a class that are named like a hook and are none."""
    library_classes = [parent for parent in kind.__mro__ if not _is_users(parent)]
    for name, method in _methods_of_user(kind):
        if not name.startswith("on_") or hasattr(base, name):
            continue
        # A library may call hooks that it defines.
        is_inherited = False
        for parent in library_classes:
            if name in vars(parent):
                is_inherited = True
        if not is_inherited:
            yield kind, base, method


def _methods_of_user(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for parent in kind.__mro__:
        if not _is_users(parent):
            continue
        attributes = vars(parent)
        for name, value in attributes.items():
            if isinstance(value, FunctionType):
                yield name, value


def _is_users(kind: type) -> bool:
    """Return True for a class of the user's, none of whose functions is in an installed package."""
    if kind.__module__.partition(".")[0] in ("builtins", "equipoise"):
        return False
    attributes = vars(kind)
    functions = [value for value in attributes.values() if isinstance(value, FunctionType)]
    return not any(_is_installed(function) for function in functions)


def _is_installed(function: FunctionType) -> bool:
    filename = function.__code__.co_filename
    return any(folder in filename for folder in _INSTALLED)


def _hooks(base: type) -> list[str]:
    return [name for name in dir(base) if name.startswith("on_")]


def _names_in(kinds: Iterable[type]) -> Iterator[str]:
    """Yield every name that the functions of classes, and of the files that define the classes, use."""
    for kind in kinds:
        for _, method in _methods_of_user(kind):
            yield from _names_of(method.__code__)
            # The user's code may add global names from another thread, so this reads a copy.
            for value in list(method.__globals__.values()):
                is_function = isinstance(value, FunctionType)
                if is_function and value.__globals__ is method.__globals__:
                    yield from _names_of(value.__code__)


def _names_of(code: CodeType) -> Iterator[str]:
    """Yield the names and texts in a piece of code; a text may be an argument of `getattr`."""
    # Other code is the body of a class, whose names are those that it defines.
    if code.co_flags & inspect.CO_OPTIMIZED:
        yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_of(constant)
