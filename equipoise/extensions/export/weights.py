"""Named weights of a checkpoint, a module or a dictionary; those of a checkpoint are read piece by piece."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.extensions.export.layout import CODES, FORMAT, METADATA
from equipoise.interop.torch.modules import uncompiled_name
from equipoise.parallel.shards.placeholders import name_of
from equipoise.trainer.checkpointing.module.names import with_present_names
from equipoise.trainer.checkpointing.reading import ReadValues, open_any_checkpoint

__all__ = ["Source", "Weights", "chosen_state", "open_weights"]

Source = str | os.PathLike[str] | nn.Module | Mapping[str, Any]
"""Something with weights: the path or URL of a checkpoint, a module, or tensors by name."""

# The weights in a checkpoint that a `WeightAveraging` has written.
_CHOICES = ("averaged", "trained")

# Where Lightning's WeightAveraging keeps the weights that training continues with; those in "state_dict" are averaged.
_TRAINED = "current_model_state"

# Names that a message lists.
_MOST_NAMES = 6


@dataclass(frozen=True)
class Weights:
    """Weights by name.

    Attributes:
        tensors: A tensor for each name, from which `read` makes one with values.
        aliases: Names of tensors that another name stands for, too, each with that name: the first in the module.
        left_out: Names outside of the prefix.
        read: Yields the values of a tensor in order, in pieces of any shape, on the CPU.
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    left_out: tuple[str, ...]
    read: ReadValues

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield the values of a tensor in order: flat pieces, on the CPU."""
        elements_left = self.tensors[name].numel()
        for piece in self.read(self.tensors[name]):
            elements_left -= piece.numel()
            yield piece.detach().resolve_conj().resolve_neg().reshape(-1)
        # The sizes that an archive names may be wrong.
        if elements_left:
            raise CheckpointError(f"The values of {name!r} are not as many as its shape says: the file is damaged.")

    def value(self, name: str) -> Tensor:
        """Return a tensor with its values, on the CPU."""
        tensor = self.tensors[name]
        pieces = list(self.pieces(name))
        # One is not copied.
        flat = pieces[0] if len(pieces) == 1 else torch.cat([tensor.new_empty(0, device="cpu"), *pieces])
        return flat.reshape(tensor.shape)

    def state(self) -> dict[str, Tensor]:
        """Return all values under all names."""
        values = {name: self.value(name) for name in self.kept_names}
        return {name: values[self.aliases.get(name, name)] for name in self.tensors}

    @property
    def kept_names(self) -> list[str]:
        """The names under which tensors are written, without aliases."""
        return [name for name in self.tensors if name not in self.aliases]


@contextmanager
def open_weights(source: Source, *, prefix: str = "", choice: str | None = None) -> Iterator[Weights]:
    """Open weights; a checkpoint stays open in the `with` block.

    Args:
        source: A checkpoint, a module, or tensors by name.
        prefix: The part of the module whose weights count, such as "model"; their names begin below it. Default: all.
        choice: See `export_weights`. Default: None.

    Raises:
        CheckpointError: If a checkpoint cannot be read, or holds values that are no plain tensors.
        ConfigurationError: If there are no weights below the prefix.
    """
    if isinstance(source, str | os.PathLike):
        with open_any_checkpoint(source) as (content, read):
            yield _named(chosen_state(content, choice), read, prefix)
    elif isinstance(source, nn.Module):
        yield _named(source.state_dict(), _present, prefix)
    else:
        yield _named(source, _present, prefix)


def chosen_state(content: dict[str, Any], choice: str | None) -> Any:
    """Return the averaged or the trained weights of a checkpoint.

    Args:
        content: The content of the checkpoint.
        choice: See `export_weights`.

    Raises:
        CheckpointError: If there are no averaged weights, but they were chosen.
        ConfigurationError: If there is no such choice.
    """
    if choice not in (None, *_CHOICES):
        raise ConfigurationError(f"weights must be one of {', '.join(_CHOICES)}, or None, not {choice!r}.")
    trained = content.get(_TRAINED)
    if choice == "averaged" and trained is None:
        raise CheckpointError("The checkpoint holds no averaged weights: no WeightAveraging callback has written it.")
    if choice == "trained" and trained is not None:
        return trained
    return content["state_dict"]


def _present(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.is_meta:
        raise CheckpointError(f"A tensor of shape {tuple(tensor.shape)} on the meta device has no values to export.")
    yield tensor.cpu()


def _named(state: Any, read: ReadValues, prefix: str) -> Weights:
    """Return the weights of a state below a prefix, after a check that all of them are plain tensors."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"Weights are tensors by name, not {state!r:.60}.")
    # Other programs do not compile the same parts.
    state = with_present_names(dict(state), [uncompiled_name(name) for name in state])

    # 1. The part that is exported.
    begin = ""
    if prefix:
        begin = prefix.rstrip(".") + "."
    chosen = {}
    left_out = []
    for name, value in state.items():
        if name.startswith(begin):
            chosen[name.removeprefix(begin)] = value
        else:
            left_out.append(name)
    if prefix and not chosen:
        raise _nothing_below(begin, left_out)

    # 2. What the format can hold of it.
    for name, value in chosen.items():
        obstacle = "has a name that means something else there" if name == METADATA else _obstacle(value)
        if obstacle is not None:
            raise CheckpointError(
                f"{name!r} cannot be exported: it {obstacle}, and safetensors holds plain tensors alone. Choose a part"
                " without it by `prefix`, or pass the tensors that you want as a dictionary."
            )
    return Weights(chosen, _aliases(chosen), tuple(left_out), read)


def _nothing_below(begin: str, names: Sequence[str]) -> ConfigurationError:
    parts = dict.fromkeys(name.partition(".")[0] for name in names)
    listed = ", ".join(list(parts)[:_MOST_NAMES])
    return ConfigurationError(f"There are no weights below {begin!r}: the names begin with {listed or 'nothing'}.")


def _obstacle(value: Any) -> str | None:
    """Return why the format cannot hold a value; None if it can."""
    if not isinstance(value, Tensor):
        return f"is no tensor but {value!r:.60}"
    if is_lazy(value):
        return "has no shape before the first forward"
    if value.is_quantized:
        return f"is quantised ({value.dtype}), with scales beside its bytes"
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {type(value).__name__}, whose values are more than its bytes"
    if value.layout is not torch.strided:
        return f"is sparse ({value.layout})"
    if value.dtype not in CODES:
        return f"has the dtype {value.dtype}"
    return None


def _aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of tied tensors but the first, each with the first.

    Views that share a part of their memory only are tensors of their own.
    """
    first_names: dict[Any, str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        # A file has an entry of that name beside those for aliases.
        if not tensor.numel() or name in FORMAT:
            continue
        first = first_names.setdefault(_identity(tensor), name)
        if first != name:
            aliases[name] = first
    return aliases


def _identity(tensor: Tensor) -> Any:
    """Return what is equal for tensors that are the same part of one memory, or of one shard."""
    name = name_of(tensor)
    if name is not None:
        return name
    # Torch returns the same object for a storage as long as anything refers to it.
    storage = tensor.untyped_storage()
    return (
        id(storage),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
