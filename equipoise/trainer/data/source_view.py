"""The origin of a loop's loaders, under the names by which modules of Lightning ask for it."""

from typing import Any

from equipoise.trainer.data.loaders import Source

__all__ = ["SourceView"]


class SourceView:
    """`_data_source` of a loop: the origin of its loaders, which some modules ask for in `configure_optimizers`.

    Args:
        source: The origin of the loaders; None before the first run.
    """

    def __init__(self, source: Source | None) -> None:
        self._source = source

    @property
    def name(self) -> str:
        """Name of the method that returns the loaders; empty where loaders were passed."""
        if self._source is None or not self.is_module():
            return ""
        return self._source.method

    @property
    def instance(self) -> Any:
        """The loaders that were passed, else the module or data module whose method returns them."""
        if self._source is None:
            return None
        if self._source.loaders is None:
            return self._source.owner
        return self._source.loaders

    def is_module(self) -> bool:
        """Return whether a method of a module or data module returns the loaders."""
        return self._source is not None and self._source.loaders is None

    def is_defined(self) -> bool:
        """Return whether there are loaders."""
        return self._source is not None and self._source.is_defined()

    def dataloader(self) -> Any:
        """Return the loaders, by calling the method if they were not passed."""
        if not self.is_module():
            return self.instance
        method = getattr(self.instance, self.name)
        return method()
