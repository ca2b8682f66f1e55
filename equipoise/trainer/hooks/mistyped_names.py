"""Warn of mistyped hooks and steps: methods that nothing calls, such as `on_trian_start` and `validaton_step`."""

import inspect
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, NamedTuple

from lightning.pytorch import LightningDataModule, LightningModule

from equipoise.callbacks.callback import Callback
from equipoise.notices import warn_of_method

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["similar_step", "warn_of_mistyped_hooks"]

# Smallest similarity of a mistyped name to a hook, a ratio of `difflib` from 0 to 1.
_MIN_SIMILARITY = 0.75
# Methods without the prefix `on_`. Names of a user's own methods are often similar, so they must be almost the same.
_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "configure_model")
_MIN_SIMILARITY_OF_STEPS = 0.9
# Folders of installed packages, whose code the user did not write.
_INSTALLED = ("site-packages", "dist-packages")


class _Suspect(NamedTuple):
    """A method that is named like a hook and is none.

    Attributes:
        kind: The class of the object that has the method.
        base: The class that declares the hooks of such objects.
        method: The method.
    """

    kind: type
    base: type
    method: FunctionType


def warn_of_mistyped_hooks(context: "RunContext") -> None:
    """Warn of methods that look like a hook, in the module, the data module and the callbacks of a run.

    A method that the classes call themselves, or that resembles no hook, is a method of the user's own.

    Args:
        context: The run.
    """
    # 1. Find methods that look like a hook and are none.
    kinds = _kinds_with_hooks(context)
    suspects: list[_Suspect] = []
    for kind, base in kinds:
        suspects += _unknown_hooks(kind, base)
    if not suspects:
        return

    # 2. Leave out methods that the user's code calls, and warn of the others.
    used_names = set(_names_in(kind for kind, _ in kinds))
    for suspect in suspects:
        if suspect.method.__name__ not in used_names:
            _warn_of_similar_hook(suspect)


def _kinds_with_hooks(context: "RunContext") -> list[tuple[type, type]]:
    """Return the classes of the objects that have hooks, each with the class that declares these hooks."""
    kinds: list[tuple[type, type]] = [(type(context.module), LightningModule)]
    if context.datamodule is not None:
        kinds.append((type(context.datamodule), LightningDataModule))
    for callback in context.state.callbacks:
        kinds.append((type(callback), Callback))
    return kinds


def _warn_of_similar_hook(suspect: _Suspect) -> None:
    """Warn of a method if a hook has a similar name."""
    name = suspect.method.__name__
    similar = similar_step(name)
    if name.startswith("on_"):
        hooks = get_close_matches(name, _hooks(suspect.base), n=1, cutoff=_MIN_SIMILARITY)
        similar = hooks[0] if hooks else None
    if similar is None:
        return
    warn_of_method(
        suspect.method,
        f"`{suspect.kind.__name__}.{name}` is called by no trainer, because no hook has that name; did you"
        f" mean `{similar}`? If it is a method of your own, which you call from another file, ignore this"
        " warning, or let the name begin with an underscore.",
    )


def similar_step(name: str) -> str | None:
    """Return the step of a module whose name is almost the same as another name; None if there is none.

    Args:
        name: The name of a method.
    """
    similar = get_close_matches(name, _STEPS, n=1, cutoff=_MIN_SIMILARITY_OF_STEPS)
    return similar[0] if similar else None


def _unknown_hooks(kind: type, base: type) -> Iterator[_Suspect]:
    """Yield the methods of a class that are named like a hook and are none."""
    # A library may call hooks that it defines.
    names_of_libraries: set[str] = set()
    for parent in kind.__mro__:
        if not _is_users(parent):
            names_of_libraries.update(vars(parent))
    for name, method in _methods_of_user(kind):
        is_hook = hasattr(base, name) or name in names_of_libraries
        may_be_meant = name.startswith("on_") or (base is LightningModule and similar_step(name) is not None)
        if may_be_meant and not is_hook:
            yield _Suspect(kind, base, method)


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
    package = kind.__module__.partition(".")[0]
    if package in ("builtins", "equipoise"):
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
            global_values = list(method.__globals__.values())
            for value in global_values:
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
