"""PackedCollate: sequences one after another in rows, without attention from one to another."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from equipoise.errors import ConfigurationError
from equipoise.extensions.tokens.grouping import group_by_sum, group_in_order
from equipoise.validation import check_whole

__all__ = ["PackedCollate"]

Attention = Literal["mask", "boolean", "positions", "documents"]

# The label that losses of transformers and torch's cross entropy leave out.
_IGNORED = -100
# The document of padding.
_PADDING = -1


class PackedCollate:
    """A collate function that packs sequences into rows instead of padding each of them.

    A batch is a dictionary of tensors whose first dimension are rows, so that strategies and `OOMRecovery` can cut it:

    - "input_ids", (rows, tokens): the sequences of a row, one after another.
    - "labels", the same shape: -100 for padding and, with `causal`, for the first token of each sequence, which the
      one before must not predict. Without labels in the samples, and with `causal`, the labels are the tokens.
    - "position_ids", the same shape: they restart at 0 with each sequence.
    - what keeps sequences from attending to others, as `attention` says.
    - other entries of the samples with a value for each token, padded with 0, but "attention_mask" is left out.

    The loss of a model of transformers is then the mean over all tokens with a label, and its weight their number:
    return `{"loss": loss, "loss_weight": (batch["labels"] != -100).sum()}`.

    Args:
        max_tokens: Largest length of a row. Default: None, a batch is one row.
        pad_to: Length of every row, for shapes that stay the same. Default: None, the longest row of the batch.
        attention: The way in which the model learns which tokens belong together. Default: "mask".
            "mask": "attention_mask", (rows, 1, tokens, tokens), which is added to the scores: 0 where a token attends
            to another, else -inf. For the implementations "sdpa" and "eager" of transformers.
            "boolean": the same as booleans, in a quarter of the memory. For "sdpa" only: "eager" would add them.
            "positions": nothing; the model finds the sequences in "position_ids". Models of transformers do so with
            FlashAttention, if a batch is one row, and with `use_cache=False` under every implementation.
            "documents": "document_ids", (rows, tokens), the number of each token's sequence, -1 for padding. For a
            network of yours with FlexAttention.
        causal: Whether tokens attend to earlier ones only, and the model predicts the next token. Default: True.
        pad_token_id: The token of padding. Default: 0.

    Raises:
        ConfigurationError: If an argument is out of range. When called: if a sequence is longer than a row, or samples
            have different entries, no "input_ids", or an entry without a value for each token.

    Example:
        >>> collate = PackedCollate(attention="positions")
        >>> batch = collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        >>> batch["input_ids"], batch["position_ids"], batch["labels"]
        (tensor([[5, 6, 7, 8, 9]]), tensor([[0, 1, 2, 0, 1]]), tensor([[-100,    6,    7, -100,    9]]))
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        *,
        pad_to: int | None = None,
        attention: Attention = "mask",
        causal: bool = True,
        pad_token_id: int = 0,
    ) -> None:
        check_whole("max_tokens", max_tokens, least=1, optional=True)
        check_whole("pad_to", pad_to, least=1, optional=True)
        if attention not in get_args(Attention):
            raise ConfigurationError(f"attention is one of {', '.join(get_args(Attention))}, not {attention!r}.")
        if pad_to is not None and max_tokens is not None and pad_to < max_tokens:
            raise ConfigurationError(f"Rows of max_tokens={max_tokens} tokens do not fit into pad_to={pad_to}.")
        self.max_tokens = max_tokens
        if max_tokens is None:
            # Rows of equal lengths need no other limit.
            self.max_tokens = pad_to
        self.pad_to = pad_to
        self.attention = attention
        self.causal = causal
        self.pad_token_id = pad_token_id

    def __call__(self, samples: Sequence[Mapping[str, Any] | Sequence[int] | Tensor]) -> dict[str, Tensor]:
        """Return the batch.

        Args:
            samples: Mappings with "input_ids", as tokenizers return them, or sequences of tokens.
        """
        sequences = [self._entries(sample) for sample in samples]
        _check_alike(sequences)
        lengths = [len(entries["input_ids"]) for entries in sequences]
        rows = self._rows(lengths)
        numbers = [_numbers(lengths, row) for row in rows]
        width = self.pad_to
        if width is None:
            width = max(map(len, numbers))
        batch = {}
        for name in sequences[0]:
            values = [entries[name] for entries in sequences]
            joined = [torch.cat([values[index] for index in row]) for row in rows]
            batch[name] = _padded(joined, width, self._padding_of(name))
        # Padding is a document by itself.
        documents = _padded(numbers, width, _PADDING)
        batch["position_ids"] = _positions(documents)
        batch.update(self._attention(documents))
        return batch

    def _rows(self, lengths: Sequence[int]) -> list[list[int]]:
        if self.max_tokens is None:
            return [list(range(len(lengths)))]
        longest = max(lengths)
        if longest > self.max_tokens:
            raise ConfigurationError(
                f"A sequence of {longest} tokens does not fit into a row of {self.max_tokens}. Truncate it, or pack"
                " into longer rows."
            )
        # A batch sampler may have chosen the rows. Sequences in any order fill them better by size.
        in_order = group_in_order(lengths, self.max_tokens)
        by_size = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        sizes = [lengths[number] for number in by_size]
        fitted = []
        for group in group_by_sum(sizes, self.max_tokens):
            fitted.append([by_size[position] for position in group])
        return min(in_order, fitted, key=len)

    def _entries(self, sample: Mapping[str, Any] | Sequence[int] | Tensor) -> dict[str, Tensor]:
        """Return the tensors of a sample, one value for each token."""
        if not isinstance(sample, Mapping):
            sample = {"input_ids": sample}
        entries = {}
        for name, values in sample.items():
            if name != "attention_mask":
                entries[name] = _tensor_of(name, values)
        if "input_ids" not in entries:
            raise ConfigurationError(f"PackedCollate needs 'input_ids' in each sample, but one has {_listed(entries)}.")
        length = len(entries["input_ids"])
        for name, tensor in entries.items():
            shape = list(tensor.shape)
            if shape[:1] != [length]:
                raise ConfigurationError(
                    f"PackedCollate needs a value for each of the {length} tokens, but {name!r} has the shape {shape}."
                    " Leave this entry out of the samples."
                )
        if self.causal:
            # Not in place: the data set keeps its samples.
            labels = entries.get("labels", entries["input_ids"])
            entries["labels"] = torch.cat([torch.full_like(labels[:1], _IGNORED), labels[1:]])
        return entries

    def _padding_of(self, name: str) -> int:
        if name == "input_ids":
            return self.pad_token_id
        if name == "labels":
            return _IGNORED
        return 0

    def _attention(self, documents: Tensor) -> dict[str, Tensor]:
        """Return what keeps the sequences apart.

        Args:
            documents: (rows, tokens), the number of the sequence of each token.
        """
        if self.attention == "positions":
            return {}
        if self.attention == "documents":
            return {"document_ids": documents}
        # Padding attends to padding, so that no token attends to nothing.
        queries = documents[:, None, :, None]
        keys = documents[:, None, None, :]
        allowed = queries == keys
        if self.causal:
            allowed = allowed.tril()
        if self.attention == "boolean":
            return {"attention_mask": allowed}
        added = torch.zeros(allowed.shape)
        added.masked_fill_(~allowed, -math.inf)
        return {"attention_mask": added}


def _tensor_of(name: str, values: Any) -> Tensor:
    """Return an entry of a sample as a tensor; tokens, and labels that are tokens, in the type that embeddings take."""
    tensor = torch.as_tensor(values)
    is_label = name == "labels" and not tensor.is_floating_point()
    if is_label or name == "input_ids":
        return tensor.long()
    return tensor


def _check_alike(sequences: Sequence[Mapping[str, Tensor]]) -> None:
    first, *others = sequences
    for other in others:
        if other.keys() != first.keys():
            raise ConfigurationError(
                "PackedCollate needs the same entries in all samples of a batch, but one has"
                f" {_listed(first)}, another one {_listed(other)}."
            )


def _listed(entries: Mapping[str, Tensor]) -> str:
    return ", ".join(map(repr, entries)) or "none"


def _padded(
    rows: Sequence[Tensor],
    width: int,
    value: int,
) -> Tensor:
    first = rows[0]
    padded = first.new_full((len(rows), width, *first.shape[1:]), value)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def _numbers(lengths: Sequence[int], row: Sequence[int]) -> Tensor:
    """Return for each token of a row the number of its sequence in the row."""
    repeats = torch.tensor([lengths[index] for index in row])
    return torch.arange(len(row)).repeat_interleave(repeats)


def _positions(documents: Tensor) -> Tensor:
    """Return for each token its position in its sequence, or in the padding.

    Args:
        documents: (rows, tokens), the number of the sequence of each token.
    """
    positions = torch.arange(documents.shape[1])
    positions = positions.expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    # The sequence of a token begins at the last beginning up to the token.
    latest = torch.where(begins, positions, 0).cummax(dim=1).values
    return positions - latest
