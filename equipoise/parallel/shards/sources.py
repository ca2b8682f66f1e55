"""Sources of placeholders: tensors of a sharded checkpoint that has been opened."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import CheckpointError
from equipoise.parallel.shards.placeholders import make_placeholder, name_of, replace_placeholders
from equipoise.parallel.shards.reading import ShardReader

__all__ = ["ShardSource", "connect_placeholders", "fetch_placeholders", "placeholder_for", "source_of"]

# The attribute of a placeholder with its source.
_SOURCE = "equipoise_source"


@dataclass(frozen=True)
class ShardSource:
    """A tensor of a sharded checkpoint.

    Attributes:
        reader: Reads the checkpoint.
        name: Name of the tensor in it.
    """

    reader: ShardReader
    name: str

    def __deepcopy__(self, memo: Any) -> "ShardSource":
        """Return the source itself: a copy of a placeholder has the same."""
        return self

    def fill(self, tensor: Tensor) -> None:
        """Read the values that this process needs; see `ShardReader.fill`."""
        self.reader.fill(self.name, tensor)

    def whole(self) -> Tensor:
        """Return the tensor as a whole, on the CPU."""
        return self.reader.whole(self.name)

    def pieces(self) -> Iterator[Tensor]:
        """Yield its values in order; see `ShardReader.pieces`."""
        return self.reader.pieces(self.name)


def source_of(value: Any) -> ShardSource | None:
    """Return the source of a placeholder that `connect_placeholders` has seen; None for any other value."""
    if name_of(value) is None:
        return None
    source = vars(value).get(_SOURCE)
    # Anyone may have written the attribute of a tensor in a file.
    if isinstance(source, ShardSource):
        return source
    return None


def placeholder_for(reader: ShardReader, name: str) -> Tensor:
    """Return a placeholder for a tensor of a sharded checkpoint.

    Args:
        reader: Reads the checkpoint.
        name: Name of the tensor in it.

    Raises:
        CheckpointError: If it has no such tensor.
    """
    saved = reader.tensor(name)
    placeholder = make_placeholder(torch.empty(saved.shape, dtype=saved.dtype, device="meta"), name)
    vars(placeholder)[_SOURCE] = ShardSource(reader, name)
    return placeholder


def connect_placeholders(content: dict[str, Any], reader: ShardReader) -> None:
    """Give all placeholders in a checkpoint their source.

    Args:
        content: The content of the file beside the shards.
        reader: Reads the shards.

    Raises:
        CheckpointError: If the shards are of other tensors.
    """

    def connect(placeholder: Tensor, name: str) -> Tensor:
        saved = reader.tensors.get(name)
        if saved is None or saved.shape != tuple(placeholder.shape) or saved.dtype != placeholder.dtype:
            raise CheckpointError(
                f"The checkpoint {str(reader.path)!r} is damaged: its shards are not those of {name!r}. Take another"
                " one."
            )
        vars(placeholder)[_SOURCE] = ShardSource(reader, name)
        return placeholder

    replace_placeholders(content, connect)


def fetch_placeholders(content: dict[str, Any], reader: ShardReader) -> None:
    """Replace all placeholders in a checkpoint by whole tensors.

    Args:
        content: The content of the file beside the shards.
        reader: Reads the shards.
    """
    connect_placeholders(content, reader)
    # A tied weight stands in several places.
    tensors: dict[str, Tensor] = {}

    def fetch(placeholder: Tensor, name: str) -> Tensor:
        if name not in tensors:
            tensors[name] = reader.whole(name)
        return tensors[name]

    replace_placeholders(content, fetch)
