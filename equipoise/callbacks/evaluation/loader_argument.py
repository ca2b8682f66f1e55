"""The loader for which an evaluation's argument stands: itself, or the result of a function or a method."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import base_of, is_a

__all__ = ["find_loader"]


def find_loader(source: Any, module: nn.Module, trainer: Any) -> Iterable[Any]:
    """Return the loader that the user gave, or the result of the function or method that the user named.

    Args:
        source: The user's argument.
        module: The module.
        trainer: The trainer, or None.

    Raises:
        ConfigurationError: If there is no loader, or one that can be read only once.
    """
    if isinstance(source, str):
        description = f"dataloader={source!r}"
        loader = _loader_of_method(source, module, trainer)
    elif callable(source) and not isinstance(source, DataLoader):
        description = "The function given as dataloader"
        loader = source()
    else:
        description = "dataloader"
        loader = source
    _check_loader(loader, description)
    return loader  # type: ignore[no-any-return]


def _loader_of_method(name: str, module: nn.Module, trainer: Any) -> Any:
    """Return the loader of the data module's method of this name, else of the module's.

    Raises:
        ConfigurationError: If both lack the method, or it returns no loader.
    """
    datamodule = getattr(trainer, "datamodule", None)
    owners = [owner for owner in (datamodule, module) if owner is not None]
    for owner in owners:
        if not _defines(owner, name):
            continue
        loader = getattr(owner, name)()
        if loader is not None and loader != []:
            return loader
    names = " and ".join(type(owner).__name__ for owner in owners)
    raise ConfigurationError(
        f"dataloader={name!r} names a method that returns a loader, but {names} have none of that name, or it returns"
        " none. Define it, or give the loader itself."
    )


def _defines(owner: Any, name: str) -> bool:
    """Return True if an object has a method of this name, other than Lightning's stock method, which only raises."""
    if not callable(getattr(owner, name, None)):
        return False
    if is_a(owner, LightningModule):
        base = base_of(owner, LightningModule)
    else:
        base = base_of(owner, LightningDataModule)
    return getattr(type(owner), name, None) is not getattr(base, name, None)


def _check_loader(loader: Any, description: str) -> None:
    is_several = isinstance(loader, dict)
    if isinstance(loader, (list, tuple)):
        is_several = any(isinstance(item, DataLoader) for item in loader)
    if is_several:
        raise ConfigurationError(
            f"{description} must be one loader, not a {type(loader).__name__} of them. Take a NoGradEvaluation for"
            " each, under names of their own."
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ConfigurationError(
            f"{description} must give a loader, that is, an iterable of batches; it is {loader!r}."
        )
    # Each evaluation reads the loader again.
    if hasattr(loader, "__next__"):
        raise ConfigurationError(
            f"{description} is a {type(loader).__name__}, which can be read only once. Give a DataLoader, a list,"
            " or a class with `__iter__`."
        )
