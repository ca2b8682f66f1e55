"""The parts of sequences that processes have, the batches that are divided, and the options."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from equipoise import StepError, Trainer
from equipoise.extensions.fsdp.mesh.context.divided_batch import divide
from equipoise.extensions.fsdp.mesh.context.row_mode import RowMode
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow
from tests.extensions.fsdp.context.networks import Gpt, Task, samples
from tests.extensions.fsdp.programs import fsdp, in_processes
from tests.support.trainer_runs import refuses

MODULE: Any = SimpleNamespace()


def of_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def pieces() -> list[Any]:
    """Return the positions of each process, a sequence that was gathered, and the gradient of its part."""
    row = SequenceRow(dist.distributed_c10d.GroupMember.WORLD)
    whole = torch.arange(24.0, dtype=torch.float64).view(2, 12)
    divide(whole, row, MODULE)
    part = row.own_part(whole, 1).requires_grad_()
    gathered = row.gather(part, 1)
    assert torch.equal(gathered, whole)
    assert torch.equal(row.gather(part > 5, 1), whole > 5)
    # Process r adds r + 1 times the whole.
    (gathered * whole * (row.rank + 1)).sum().backward()
    assert part.grad is not None
    assert torch.equal(part.grad, row.own_part(whole, 1) * sum(range(1, row.size + 1)))
    return of_all(row.positions(torch.device("cpu")).tolist())


def test_each_process_has_positions_of_both_ends() -> None:
    assert in_processes(2, pieces) == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    assert in_processes(3, pieces) == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def kept() -> int:
    """Return the bytes of the largest storage that causal attention keeps for its backward."""
    row = SequenceRow(dist.distributed_c10d.GroupMember.WORLD)
    row.begin(256)
    part = row.own_part(torch.randn(3, 1, 2, 256, 4, dtype=torch.float64), -2).requires_grad_()
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), row.divided(), RowMode(row):
        nn.functional.scaled_dot_product_attention(*part, is_causal=True)
    return max(sizes)


def test_causal_attention_keeps_no_mask_of_pairs() -> None:
    """Keys of the whole sequence are the largest, where a mask would have 128 x 256 numbers."""
    assert in_processes(2, kept) == 2 * 256 * 4 * 8


def dropped() -> list[Any]:
    """Return what dropout of parts leaves, and the host's numbers after it."""
    row = SequenceRow(dist.distributed_c10d.GroupMember.WORLD)
    found: list[Any] = []
    attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True, dtype=torch.float64).eval()
    for function in (nn.functional.dropout, torch.dropout, nn.functional.feature_alpha_dropout):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        ones = torch.ones(4, 8, 4, dtype=torch.float64)
        row.begin(8)
        with row.divided(), RowMode(row):
            for options in ((0.0, True), (0.5, False)):
                assert torch.equal(function(ones, *options), ones)
            attention(ones[:, :4], ones[:, :4], ones[:, :4])
            assert torch.equal(torch.get_rng_state(), before), function
            left = function(ones, 0.5, True)
        found.append((left, torch.get_rng_state()))
    return of_all(found)


def test_only_dropout_that_drops_draws_random_numbers() -> None:
    """It draws others in each process, and all processes go on with the same."""
    for (left, numbers), (left_there, numbers_there) in zip(*in_processes(2, dropped), strict=True):
        assert not torch.equal(left, left_there)
        assert torch.equal(numbers, numbers_there)


def losses() -> list[tuple[float, float]]:
    """Return means over labels, of which one process has fewer or none, beside those of the whole."""
    row = SequenceRow(dist.distributed_c10d.GroupMember.WORLD)
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(1, 8, 5, generator=draw, dtype=torch.float64)
    labels = torch.tensor([[-100, 1, -100, 4, 2, 0, -100, -100]])
    nowhere = torch.tensor([[-100, -100, 1, 4, 2, 0, -100, -100]])
    options: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (nowhere, {"label_smoothing": 0.2}),
        (labels, {"weight": torch.rand(5, generator=draw, dtype=torch.float64)}),
        (labels.clamp(min=0), {"ignore_index": 0}),
        (logits.softmax(-1).roll(1, 1), {}),  # probabilities
    ]
    found = []
    for target, more in options:
        expected = nn.functional.cross_entropy(logits[0], target[0], **more)
        here, there = divide({"input_ids": logits, "target": target}, row, MODULE).values()
        here.requires_grad_()
        with row.divided(), RowMode(row) as mode:
            mean = nn.functional.cross_entropy(here[0], there[0], **more)
        assert mode.counts_labels
        assert torch.autograd.grad(mean, here)[0].isfinite().all()
        found.append((float(expected), float(row.all_reduce(mean)) / row.size))
    return found


def test_mean_losses_count_the_labels_of_all_processes() -> None:
    for expected, mean in in_processes(2, losses):
        assert mean == pytest.approx(expected, rel=1e-14)


class Dims:
    """A module that says which dimensions are divided."""

    def __init__(self, dims: Any) -> None:
        self.dims = dims

    def context_dims(self, batch: Any) -> Any:
        return self.dims


TOKENS = torch.zeros(2, 16, dtype=torch.long)
OTHERS = {"a": torch.ones(4, 2), "b": torch.ones(2, 4), "c": [torch.ones(2, 4)]}
LIKE_A_PART = "has 8 positions, as many as each process has of sequences of 16"
# The batch, the module and the words of the error.
INDIVISIBLE: list[tuple[Any, Any, str]] = [
    (torch.ones(3), MODULE, "no tensor of this one has two dimensions"),
    (torch.ones(2, 6), MODULE, "of 6 positions are not divided evenly: with context=2 the length is a multiple of 4"),
    (OTHERS, Dims({"a": 0, "b": 0}), "'b' along dimension 0, whose length is 2, but sequences have 4 positions"),
    (OTHERS, Dims({}), "but {} came for a batch of type dict"),
    (OTHERS, Dims(1), "but 1 came for a batch of type dict"),
    ({"input_ids": TOKENS, "other": torch.zeros(2, 8, 4)}, MODULE, LIKE_A_PART),
    ({"input_ids": TOKENS, "other": TOKENS[:, :8]}, MODULE, LIKE_A_PART),
]


def divide_in_vain() -> None:
    row = SequenceRow(dist.distributed_c10d.GroupMember.WORLD)
    for batch, module, words in INDIVISIBLE:
        with pytest.raises(StepError) as caught:
            divide(batch, row, module)
        assert words in str(caught.value)
    divided = divide(OTHERS, row, Dims({"a": 0, "b": 1}))
    assert [tuple(tensor.shape) for tensor in (divided["a"], divided["b"], divided["c"][0])] == [(2, 2), (2, 2), (2, 4)]
    # Features of samples, and a sequence of another length.
    for other in (torch.zeros(2, 8), torch.zeros(2, 9, dtype=torch.long)):
        assert divide({"input_ids": TOKENS, "other": other}, row, MODULE)["other"].shape == other.shape


def test_batches_that_cannot_be_divided_are_refused() -> None:
    in_processes(2, divide_in_vain)


def test_compiled_blocks_are_refused() -> None:
    run = Trainer(strategy=fsdp(context=2), devices=["cpu"] * 2, compile=True)
    words = "compile=True compiles blocks of the network, but strategy='fsdp'"
    refuses(lambda: run.fit(Task(Gpt()), samples(4)), words)  # type: ignore[arg-type]
