"""The attribute of a module or data module from which its loaders take their batch size."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

from equipoise.errors import ConfigurationError

__all__ = ["BatchSizeAttribute"]


class BatchSizeAttribute:
    """An attribute or hyperparameter with the batch size.

    Raises:
        ConfigurationError: If neither has it.
    """

    def __init__(self, name: str, module: LightningModule, datamodule: Any) -> None:
        self._name = name
        self._datamodule = datamodule
        if not self._holders(module):
            raise ConfigurationError(
                f"BatchSizeFinder: neither {type(module).__name__} nor a data module has an attribute or hyperparameter"
                f" `{name}`. Let the loaders read their batch size there, or name another one by batch_arg_name."
            )

    def set(self, module: LightningModule, size: int) -> None:
        """Set the batch size."""
        for holder in self._holders(module):
            self._set_in(holder, size)

    @contextmanager
    def set_for_trial(self, module: LightningModule, size: int) -> Iterator[None]:
        """Set the batch size of a copy of the module; at the end the data module has its own again."""
        holders = self._holders_in(self._datamodule)
        before = [self._value_in(holder) for holder in holders]
        self.set(module, size)
        try:
            yield
        finally:
            for holder, value in zip(holders, before, strict=True):
                self._set_in(holder, value)

    def _holders(self, module: LightningModule) -> list[Any]:
        return [*self._holders_in(module), *self._holders_in(self._datamodule)]

    def _holders_in(self, owner: Any) -> list[Any]:
        """Return an object itself and its hyperparameters, as far as they have the batch size."""
        holders = []
        if hasattr(owner, self._name):
            holders.append(owner)
        hyperparameters = getattr(owner, "hparams", None)
        has_name = hasattr(hyperparameters, self._name)
        if isinstance(hyperparameters, dict):
            has_name = self._name in hyperparameters
        if has_name:
            holders.append(hyperparameters)
        return holders

    def _value_in(self, holder: Any) -> Any:
        if isinstance(holder, dict):
            return holder[self._name]
        return getattr(holder, self._name)

    def _set_in(self, holder: Any, size: Any) -> None:
        if isinstance(holder, dict):
            holder[self._name] = size
        else:
            setattr(holder, self._name, size)
