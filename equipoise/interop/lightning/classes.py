"""Lightning's classes in its two packages: `lightning.pytorch` and `pytorch_lightning`.

Libraries import the one or the other, and a class of one is no class of the other. A class stands for its namesake
here: `is_a(module, LightningModule)` is true for both. The older package is never imported; its classes are known by
the names of their modules.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeGuard

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.utilities import model_helpers
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from equipoise.errors import ConfigurationTypeError

__all__ = ["base_of", "is_a", "is_overridden", "is_stock", "module_classes", "takes_iterator", "with_index"]

_OLDER = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


def is_a(value: Any, *kinds: Any) -> TypeGuard[Any]:
    """Return whether a value is an instance of a class of Lightning, or of its namesake in the other package.

    Args:
        value: Any object.
        kinds: Classes of `lightning.pytorch` or `lightning.fabric`.

    Example:
        >>> is_a(LightningDataModule(), LightningModule, LightningDataModule)
        True
    """
    if isinstance(value, kinds):
        return True
    return any(_namesake_in(type(value), kind) is not None for kind in kinds)


def base_of(value: Any, kind: type) -> Any:
    """Return the class whose methods a value has inherited: `kind`, or its namesake in the other package.

    Args:
        value: An instance of `kind`, of a class of Lightning from which `kind` is derived, or of a namesake of these.
        kind: A class of Lightning, or one derived from it, such as our Callback.
    """
    for base in kind.__mro__:
        if base is object or isinstance(value, base):
            break
        namesake = _namesake_in(type(value), base)
        if namesake is not None:
            return namesake
    return kind


def is_stock(value: Any, *kinds: type) -> TypeGuard[Any]:
    """Return whether a value is of a class of Lightning itself, or of its namesake, and of no class derived from it.

    Args:
        value: Any object.
        kinds: Classes of Lightning.
    """
    own = type(value)
    return any(own is kind or own is _namesake_in(own, kind) for kind in kinds)


def module_classes() -> tuple[Any, ...]:
    """Return the class of modules, followed by that of the older package if it is imported."""
    older = sys.modules.get("pytorch_lightning.core.module")
    if older is None:
        return (LightningModule,)
    return LightningModule, older.LightningModule


def is_overridden(name: str, value: Any) -> bool:
    """Return whether a module, data module or callback, of either package, overrides a method.

    Args:
        name: The method's name.
        value: The object; None overrides nothing.

    Raises:
        ConfigurationTypeError: If an attribute of the object, which cannot be called, hides the method.
    """
    own = getattr(value, "__dict__", {}).get(name)
    if own is not None and not callable(own):
        raise ConfigurationTypeError(f"{type(value).__name__}.{name} is a method, but was set to {type(own).__name__}.")
    for kind in (LightningModule, LightningDataModule, Callback):
        if is_a(value, kind):
            return model_helpers.is_overridden(name, value, base_of(value, kind))
    return model_helpers.is_overridden(name, value)


def takes_iterator(module: Any, step: str) -> bool:
    """Return whether a step takes an argument `dataloader_iter`, from which the step itself would pull its batches.

    Args:
        module: A module.
        step: The name of the step, such as "training_step".
    """
    method = getattr(module, step, None)
    return callable(method) and is_param_in_hook_signature(method, "dataloader_iter", explicit=True)


def with_index(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step such that it accepts the index of the batch, which it may leave out.

    Args:
        step: `training_step` or one of its siblings.
    """
    # Strategies put functions around it, one around another.
    if is_param_in_hook_signature(inspect.unwrap(step), "batch_idx", min_args=2):
        return step
    return lambda batch, batch_idx, *rest: step(batch, *rest)


def _namesake_in(kind: type, original: type) -> type | None:
    """Return the base of `kind` that has the name of `original` in the older package."""
    # `pytorch_lightning` imports `lightning_fabric`, too.
    if "lightning_fabric" not in sys.modules:
        return None
    package = ".".join(original.__module__.split(".")[:2])
    if package not in _OLDER:
        return None
    module = _OLDER[package] + original.__module__.removeprefix(package)
    for base in kind.__mro__:
        if base.__module__ == module and base.__qualname__ == original.__qualname__:
            return base
    return None
