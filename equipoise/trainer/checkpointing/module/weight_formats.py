"""Formats of files with weights alone, found by the ends of their names, which extensions add by entry points.

[project.entry-points."equipoise.weight_formats"]
npz = "my_package.format:Npz"
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from equipoise.errors import ConfigurationError
from equipoise.names.extensions import load_extension, names_of_extensions

__all__ = ["WeightFormat", "format_of"]

_GROUP = "weight_formats"


class WeightFormat(ABC):
    """Writes and reads files with weights and nothing else."""

    @abstractmethod
    def write(self, weights: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
        """Write weights completely or not at all; called in the main process.

        Args:
            weights: The state of a module.
            path: The file, which replaces an earlier one: a local path, or a URL.

        Raises:
            CheckpointError: If they cannot be written.
        """

    @abstractmethod
    def read(self, path: str | os.PathLike[str]) -> dict[str, Tensor]:
        """Return the weights in a file, on the CPU; called in every process.

        Args:
            path: The file.

        Raises:
            CheckpointError: If they cannot be read.
        """


def format_of(path: Any, checkpoint_io: Any = None) -> WeightFormat | None:
    """Return the format of a file of weights; None for a checkpoint.

    Args:
        path: Its path, whose end after the last dot is the name of the format.
        checkpoint_io: The user's plugin, which writes and reads files of all names. Default: None, there is none.

    Raises:
        ConfigurationError: If the format cannot be loaded.
    """
    _, dotted_suffix = os.path.splitext(os.fspath(path))
    suffix = dotted_suffix.removeprefix(".")
    # Most files are checkpoints, for which no entry point is read.
    if checkpoint_io is not None or suffix in ("", "ckpt"):
        return None
    if suffix not in names_of_extensions(_GROUP):
        return None
    kind = load_extension(_GROUP, suffix)
    if not isinstance(kind, type) or not issubclass(kind, WeightFormat):
        raise ConfigurationError(f"The format {suffix!r} must be a class of WeightFormat, not {kind!r}.")
    return kind()
