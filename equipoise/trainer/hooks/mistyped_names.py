"""Warn of mistyped hooks and steps: methods that nothing calls, such as `on_trian_start` and `validaton_step`."""

import inspect
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from types import CodeType, FunctionType

from lightning.pytorch import Callback as LightningCallback
from lightning.pytorch import LightningDataModule, LightningModule

from equipoise.callbacks.callback import Callback
from equipoise.notices import warn_of_method

__all__ = ["warn_of_mistyped_hooks"]

# Smallest similarity of a mistyped name to a hook, a ratio of `difflib` from 0 to 1.
_MIN_SIMILARITY = 0.75
# Folders of installed packages, whose code the user did not write.
_INSTALLED = ("site-packages", "dist-packages")


def warn_of_mistyped_hooks(
    module: LightningModule, datamodule: LightningDataModule | None, callbacks: Iterable[LightningCallback]
) -> None:
    """Warn of methods that look like a hook, in the module, the data module and the callbacks of a run.

    A method that the user's code names elsewhere, or that resembles no hook, is a method of the user's own.

    Args:
        module: The user's module.
        datamodule: The data module; None if there is none.
        callbacks: The callbacks.
    """
    # 1. Each class, with the class that declares the hooks of its objects.
    kinds: list[tuple[type, type]] = [(type(module), LightningModule)]
    if datamodule is not None:
        kinds.append((type(datamodule), LightningDataModule))
    kinds += [(type(callback), Callback) for callback in callbacks]

    # 2. Methods that are named almost like a hook. Few runs have any.
    suspects = []
    for kind, base in kinds:
        for name, method in _methods_of_user(kind):
            hook = _meant(name, kind, base)
            if hook is not None:
                suspects.append((kind, name, method, hook))
    if not suspects:
        return

    # 3. Those that nobody calls.
    used_names = set(_names_in(kind for kind, _ in kinds))
    for kind, name, method, hook in suspects:
        if name not in used_names:
            warn_of_method(
                method,
                f"`{kind.__name__}.{name}` is called by no trainer, because no hook has that name; did you mean"
                f" `{hook}`? If it is a method of your own, which you call from another file, ignore this warning, or"
                " let the name begin with an underscore.",
            )


def _meant(name: str, kind: type, base: type) -> str | None:
    """Return the hook that the name of a method resembles; None if it is one, or resembles none."""
    if hasattr(base, name):
        return None
    from equipoise.names.synonyms import meant_hooks, similar_step

    similar = None
    if name.startswith("on_"):
        hooks = [hook for hook in dir(base) if hook.startswith("on_")]
        near = [*meant_hooks(name), *get_close_matches(name, hooks, n=1, cutoff=_MIN_SIMILARITY)]
        similar = next(iter(near), None)
    elif base is LightningModule:
        similar = similar_step(name)
    if similar is None:
        return None
    # A library may call hooks that it defines. This is asked last, since it reads every function of a class.
    for parent in kind.__mro__:
        if name in vars(parent) and not _is_users(parent):
            return None
    return similar


def _methods_of_user(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for parent in filter(_is_users, kind.__mro__):
        attributes = vars(parent)
        for name, value in attributes.items():
            if isinstance(value, FunctionType):
                yield name, value


def _is_users(kind: type) -> bool:
    if kind.__module__.partition(".")[0] in ("builtins", "equipoise"):
        return False
    for value in vars(kind).values():
        if not isinstance(value, FunctionType):
            continue
        # A decorator may have wrapped another callable object.
        function = inspect.unwrap(value)
        if isinstance(function, FunctionType):
            file = function.__code__.co_filename
            if any(folder in file for folder in _INSTALLED):
                return False
    return True


def _names_in(kinds: Iterable[type]) -> Iterator[str]:
    """Yield every name that the functions of classes, and of the files that define the classes, use."""
    for kind in kinds:
        for _, method in _methods_of_user(kind):
            yield from _names_of(method.__code__)
            # The user's code may add global names from another thread, so this reads a copy.
            global_values = list(method.__globals__.values())
            for value in global_values:
                if isinstance(value, FunctionType) and value.__globals__ is method.__globals__:
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
