"""Lists of blocks between which sequences are divided: the first divides what it receives, the last gathers it.

Everything else in the network is the same in all processes of a row, so it may be what no part of a sequence could be
given to: a convolution, a class token, a mean over positions.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

from torch import Tensor, nn

from equipoise.errors import ConfigurationError, StepError
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow
from equipoise.extensions.fsdp.mesh.plans.patterns import expression_of
from equipoise.tree import map_leaves, tensors_in

__all__ = ["DividedBlocks"]

_OPTION = "FSDPStrategy(context_blocks=...)"

# Names of arguments of torch's layers that are masks of pairs of positions.
_OF_PAIRS = ("src_mask", "tgt_mask", "memory_mask", "attn_mask")
# Words in the names of arguments that have a value for each position of each sample.
_OF_SAMPLES = ("padding", "position_ids")


class DividedBlocks:
    """The blocks of a module that compute parts of sequences while `is_active`.

    The first tensor that a block receives has samples, positions and channels. Others are divided where their second
    dimension has as many positions, and masks of pairs of positions along their queries.

    Args:
        module: The user's module.
        patterns: Names of the lists of blocks, with * and **.
        row: The processes that have parts of the sequences.

    Attributes:
        is_active: Whether blocks compute parts. Default: False.

    Raises:
        ConfigurationError: If a pattern names no list of blocks, or one within another, or if their attention is not
            batch first.
    """

    def __init__(self, module: nn.Module, patterns: Sequence[str], row: SequenceRow) -> None:
        self.is_active = False
        self._row = row
        self._hooks: list[Any] = []
        self._biased: list[Any] = []
        # The list whose first block has divided a sequence, and its length there.
        self._open: str | None = None
        self._length = 0
        lists = dict(_lists_of_blocks(module, patterns))
        _check_batch_first(lists)
        for name, blocks in lists.items():
            for number, block in enumerate(blocks):
                is_last = number == len(blocks) - 1
                enter = block.register_forward_pre_hook(partial(self._enter, name, number == 0), with_kwargs=True)
                leave = block.register_forward_hook(partial(self._leave, is_last))
                self._hooks += [enter, leave]
                self._biased += _with_bias(block)
        for part in self._biased:
            vars(part)["compute_bias"] = partial(self._bias, part.compute_bias, part.is_decoder)

    def __deepcopy__(self, memo: Any) -> "DividedBlocks":
        # A copy of the module has hooks that refer to it.
        return self

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        for part in self._biased:
            vars(part).pop("compute_bias", None)

    def begin(self) -> None:
        """Begin a forward or backward in which blocks compute parts."""
        self.is_active = True
        self._open = None

    def end(self) -> None:
        """End it, also after an error."""
        self.is_active = False
        self._row.leave()

    def check_gathered(self, error: Exception | None = None) -> None:
        """Check that what the first block of a list has divided was gathered by the last.

        Args:
            error: An error of the forward. Default: None.

        Raises:
            StepError: If it was not, and no block has raised the error.
        """
        if self._open is not None and not self._row.is_divided:
            raise StepError(_in_order(self._open)) from error

    def _enter(self, name: str, is_first: bool, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Give a block the part of this process of all that it receives."""
        if not self.is_active:
            return None
        # 1. The first block begins with whole sequences, and the others have parts.
        hidden = _first_sequence(name, (args, kwargs))
        expected: str | None = name
        if is_first:
            expected = None
        if self._open != expected:
            raise StepError(_in_order(name))
        if is_first:
            self._open = name
            self._length = hidden.size(1)

        # 2. What depends on positions is divided for each block.
        self._row.enter(self._length)

        def own_part(argument: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.ndim < 2 or (leaf is hidden and not is_first):
                return leaf
            return self._own_part(leaf, argument, samples=hidden.size(0))

        names = chain(inspect.signature(block.forward).parameters, repeat(""))
        parts = [map_leaves(partial(own_part, argument), value) for argument, value in zip(names, args, strict=False)]
        return tuple(parts), {key: map_leaves(partial(own_part, key), value) for key, value in kwargs.items()}

    def _own_part(self, whole: Tensor, argument: str, samples: int) -> Tensor:
        """Return the part of this process of a tensor that a block receives, or all of it."""
        row = self._row
        is_of_pairs = whole.shape[-2:] == (row.length, row.length)
        if is_of_pairs and whole.ndim == 2 and samples == row.length:
            # With as many samples as positions both kinds of masks have this shape.
            is_of_pairs = _is_of_pairs(argument, row.length)
        # A mask keeps all keys.
        if is_of_pairs:
            return row.own_part(whole, whole.ndim - 2)
        # Those with more dimensions have heads in the second one.
        if whole.ndim < 4 and whole.size(1) == row.length:
            return row.own_part(whole, 1)
        row.check_whole(whole)
        return whole

    def _leave(self, is_last: bool, block: nn.Module, args: Any, output: Any) -> Any:
        """Gather what the last block of a list returns."""
        if not self.is_active:
            return None
        row = self._row
        row.leave()
        if not is_last:
            return None
        name = self._open
        self._open = None
        hidden = _first_sequence(str(name), output)

        def gathered(leaf: Any) -> Any:
            if leaf is hidden:
                return row.gather(leaf, 1)
            return leaf

        return map_leaves(gathered, output)

    def _bias(self, compute: Any, is_causal: bool, queries: int, keys: int, **options: Any) -> Tensor:
        """Return the bias of distances from the positions of this process to all of them."""
        row = self._row
        # Attention to other keys, and evaluations.
        if not row.is_divided or keys != row.part_length:
            bias: Tensor = compute(queries, keys, **options)
            return bias
        if is_causal:
            raise StepError(
                f"{_OPTION}: the bias of distances of a decoder is no mask over all positions. Name encoders alone."
            )
        return row.own_part(compute(row.length, row.length, **options), 2)


def _with_bias(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the attention of models of transformers with a bias of distances, as T5 has it."""
    for part in block.modules():
        if getattr(part, "has_relative_attention_bias", False) and hasattr(part, "compute_bias"):
            yield part


def _first_sequence(name: str, value: Any) -> Tensor:
    """Return the first tensor of samples, positions and channels in what a block receives or returns."""
    for tensor in tensors_in(value):
        if tensor.ndim == 3:
            return tensor
    raise StepError(f"{_OPTION}: a block of {name} has no tensor of samples, positions and channels to divide.")


def _is_of_pairs(argument: str, length: int) -> bool:
    """Return whether an argument is a mask of pairs of positions, rather than one of samples and positions."""
    if argument in _OF_PAIRS:
        return True
    if any(word in argument for word in _OF_SAMPLES):
        return False
    raise StepError(
        f"{_OPTION}: a block receives a tensor of shape [{length}, {length}] in the argument {argument!r}. With as many"
        " samples as positions it may be a mask of pairs of positions, or one of samples and positions. Name the"
        " argument 'padding_mask' if it is of the latter kind, give the former three dimensions, or take another"
        " batch size."
    )


def _check_batch_first(lists: Mapping[str, Sequence[nn.Module]]) -> None:
    """Check that samples come first in all attention of torch."""
    for name, blocks in lists.items():
        for block in blocks:
            for part in block.modules():
                if isinstance(part, nn.MultiheadAttention) and not part.batch_first:
                    raise ConfigurationError(
                        f"{_OPTION} divides the second dimension of what a block receives, but the attention of {name}"
                        " has samples there. Make its layers with batch_first=True, and give them (samples, positions,"
                        " channels)."
                    )


def _in_order(name: str) -> str:
    return (
        f"{_OPTION}: the blocks of {name} were not called one after the other, from the first to the last. The first"
        " divides sequences, and the last gathers them, so none is left out, as by LayerDrop."
    )


def _lists_of_blocks(module: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield the name and the blocks of each list that a pattern names."""
    # 1. The lists, in the order of their names.
    lists: dict[str, list[nn.Module]] = {}
    for pattern in patterns:
        expression = expression_of(pattern)
        names = []
        for name, part in module.named_modules():
            if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) and expression.fullmatch(name):
                names.append(name)
                lists[name] = list(part)
        if not names:
            raise ConfigurationError(f"{_OPTION} has {pattern!r}, which names no nn.ModuleList or nn.Sequential.")
    # 2. None of them lies within another.
    for name in lists:
        for outer in lists:
            if name.startswith(f"{outer}."):
                raise ConfigurationError(f"{_OPTION} names {name}, which lies within {outer}. Name one of both.")
    yield from lists.items()
