"""Packed sequences: the loss and gradients of the same sequences one by one."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from equipoise import PackedCollate, TokenBatchSampler
from tests.extensions.tokens.language_models import language_model, summed_loss
from tests.extensions.tokens.sequences import tokens
from tests.support.equality import assert_equal
from tests.support.pairs import pairwise
from tests.support.trainer_runs import refuses

pytest.importorskip("transformers")

LENGTHS = [3, 17, 1, 8, 30, 2, 5, 12]


def separate_gradients(net: Any, sequences: list[Tensor]) -> list[Tensor]:
    """The mean over all predicted tokens, of each sequence by itself, and its gradients."""
    sums = [summed_loss(net, {"input_ids": each[None], "labels": each[None]}) for each in sequences]
    loss = torch.stack(sums).sum() / sum(len(each) - 1 for each in sequences)
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


ATTENTIONS = [("sdpa", "mask"), ("eager", "mask"), ("sdpa", "boolean"), ("sdpa", "positions"), ("eager", "positions")]
ROWS: list[dict[str, Any]] = [{}, {"max_tokens": 32}, {"max_tokens": 32, "pad_to": 40}]


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(("attentions", "options", "name"), pairwise(ATTENTIONS, ROWS, ["llama", "gpt2"]))
def test_packed_sequences_have_the_gradients_of_separate_ones(
    attentions: tuple[str, Any], options: dict[str, Any], name: str
) -> None:
    implementation, attention = attentions
    net = language_model(name, implementation)
    sequences = tokens(LENGTHS)
    batch = PackedCollate(attention=attention, **options)([{"input_ids": each.tolist()} for each in sequences])
    if attention == "mask":
        # As Trainer(precision="64-true") does.
        batch["attention_mask"] = batch["attention_mask"].double()
    count = (batch["labels"] != -100).sum()
    assert int(count) == sum(LENGTHS) - len(LENGTHS)
    loss = summed_loss(net, batch) / count
    packed = [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]
    # Llama's "eager" attention rounds to float32.
    tolerance = 1e-6 if (name, implementation) == ("llama", "eager") else 1e-10
    assert_equal(separate_gradients(net, sequences), packed, tolerance)
    # The model's own loss is the same, in float32.
    torch.testing.assert_close(net(**batch, use_cache=False).loss.double(), loss, rtol=1e-6, atol=1e-6)


def test_rows_have_labels_positions_and_documents() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "kind": [7, 8, 9], "attention_mask": [1, 1, 1]},
        {"input_ids": [4], "kind": [6]},
    ]
    batch = PackedCollate(pad_to=6, pad_token_id=99, attention="documents")(samples)
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[1, 2, 3, 4, 99, 99]],
        "kind": [[7, 8, 9, 6, 0, 0]],
        "labels": [[-100, 2, 3, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 0, 1]],
        "document_ids": [[0, 0, 0, 1, -1, -1]],
    }
    assert [tuple(row.shape) for row in PackedCollate(4)(tokens([2, 2, 3, 1, 4])).values()] == [(3, 4)] * 3 + [
        (3, 1, 4, 4)
    ]


@pytest.mark.parametrize(("rows", "most"), [(1, None), (3, 9), (8, None)])
def test_rows_of_a_sampler_keep_its_budget(rows: int, most: int | None) -> None:
    lengths = [random.Random(seed).randint(1, 64) for seed in range(300)]
    data = tokens(lengths)
    sampler = TokenBatchSampler(lengths, 64 * rows, padded=False, row_tokens=64, max_samples=most)
    collate = PackedCollate(64, attention="documents")
    read = []
    for batch in sampler:
        assert len(batch) <= (most or 300)
        for part in (batch, *(part for part in sampler.deal_step([batch], 3) if part)):
            assert collate([data[index] for index in part])["input_ids"].numel() <= 64 * rows
        read += batch
    assert sorted(read) == list(range(300))


def test_tokens_of_any_whole_type_are_taken() -> None:
    """Files of tokens hold short whole numbers, and -100 is none of them."""
    samples = [{"input_ids": numpy.array([1, 60000], numpy.uint16), "labels": numpy.array([1, 2], numpy.uint8)}]
    samples.append({"input_ids": numpy.array([], numpy.uint16), "labels": numpy.array([], numpy.uint8)})
    batch = PackedCollate(attention="positions")(samples)
    assert batch["input_ids"].tolist() == [[1, 60000]]
    assert batch["labels"].tolist() == [[-100, 2]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert PackedCollate(causal=False)([{"input_ids": [1], "labels": [0.5]}])["labels"].tolist() == [[0.5]]


def test_tokens_attend_in_both_directions_without_causal() -> None:
    """Without `causal` a token attends to all of its sequence, and labels stay."""
    batch = PackedCollate(causal=False, attention="boolean")(
        [{"input_ids": [1, 2], "labels": [1, -100]}, {"input_ids": [3], "labels": [3]}]
    )
    assert batch["attention_mask"].int().tolist() == [[[[1, 1, 0], [1, 1, 0], [0, 0, 1]]]]
    assert batch["labels"].tolist() == [[1, -100, 3]]
    assert "labels" not in PackedCollate(causal=False)([{"input_ids": [1, 2]}])


def test_documents_give_flex_attention_the_boolean_mask() -> None:
    """The mask that documents give torch's FlexAttention is the boolean one."""
    from torch.nn.attention.flex_attention import create_mask

    samples = tokens([5, 9, 3, 7])
    documents = PackedCollate(12, attention="documents")(samples)["document_ids"]

    def same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents[batch, query] == documents[batch, key]) & (query >= key)

    mask = create_mask(same_document, len(documents), 1, documents.shape[1], documents.shape[1], "cpu")
    assert torch.equal(mask, PackedCollate(12, attention="boolean")(samples)["attention_mask"])


@pytest.mark.parametrize(
    ("make", "samples", "text"),
    [
        (lambda: PackedCollate(attention="flash"), None, "attention is one of mask, boolean, positions, documents"),  # type: ignore[arg-type]
        (lambda: PackedCollate(8, pad_to=6), None, "Rows of max_tokens=8 tokens do not fit into pad_to=6"),
        (lambda: PackedCollate(0), None, "max_tokens must be an integer of at least 1, or None"),
        (lambda: PackedCollate(2), [[1, 2, 3]], "A sequence of 3 tokens does not fit into a row of 2"),
        (PackedCollate, [{"input_ids": [1, 2], "label": 1}], "'label' has the shape []"),
        (PackedCollate, [{"tokens": [1, 2]}], "needs 'input_ids' in each sample, but one has 'tokens'"),
        (PackedCollate, [{"input_ids": [1], "kind": [2]}, {"input_ids": [3]}], "has 'input_ids', 'kind', 'labels', an"),
    ],
)
def test_arguments_and_samples_that_are_refused(make: Any, samples: Any, text: str) -> None:
    refuses(lambda: make()(samples), text)
