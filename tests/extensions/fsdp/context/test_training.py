"""Training on sequences that are divided over processes: equal to one device in float64, or refused."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MeanMetric

from tests.extensions.fsdp.context.networks import (
    CASES,
    DECODER,
    Attention,
    CountedPositions,
    Gpt,
    Task,
    Weighted,
    fit,
    of_transformers,
)
from tests.extensions.fsdp.programs import (
    SavesAfter,
    assert_close,
    assert_refused_in_processes,
    assert_same_in_processes,
    fsdp,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks")]


@cache
def on_one_device(case: str, count: int) -> dict[str, Any]:
    make, options = CASES[case]
    return fit(make, count=count, **options)


@pytest.mark.parametrize(
    ("rows", "context", "cases", "count"),
    [
        (1, 2, [*CASES], 12),
        # What a process sees of masks.
        (1, 4, ["encoder", "heads", "gpt with a mask", "gpt with padding", "a window"], 12),
        # What is summed over rows. The last step of an epoch has two samples: a batch for one of the rows.
        (2, 2, ["encoder with the hint", "gpt", "sharded by the module", "computed again", "weighted by hand"], 10),
    ],
    ids=["context 2", "context 4", "data 2 x context 2"],
)
def test_training_on_divided_sequences_equals_that_of_one_device(
    rows: int, context: int, cases: list[str], count: int
) -> None:
    expected, calls = {}, {}
    for case in cases:
        make, options = CASES[case]
        expected[case] = partial(on_one_device, case, count)
        options = {"rows": rows, "count": count, **options}
        calls[case] = partial(fit, make, fsdp(context=context), rows * context, **options)
    assert_same_in_processes(rows * context, expected, calls, tolerance=1e-10)


class OwnLoss(Task):
    """Leaves the shift of the labels and the loss to the model."""

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.network.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        return loss

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        # Shifted before sequences are divided.
        return {**batch, "labels": functional.pad(batch["shift_labels"], (1, 0), value=-100)[:, :-1]}


class Packed(Task):
    """Three sequences in each sample, which do not see each other."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        positions = torch.cat([torch.arange(3), torch.arange(7), torch.arange(6)])
        return {**batch, "position_ids": positions.expand(batch["input_ids"].shape)}

    def loss(self, batch: Any) -> Tensor:
        # With a cache, transformers takes a sample for one sequence.
        outputs = self.network.model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        return functional.cross_entropy(outputs.logits.flatten(0, 1), batch["shift_labels"].flatten())


@pytest.mark.parametrize(
    ("kind", "precision", "tolerance"),
    # The loss of transformers is computed in float32.
    [(OwnLoss, "32-true", 1e-4), (Packed, "64-true", 1e-10)],
    ids=["own loss", "packed"],
)
def test_models_with_a_loss_of_their_own_and_packed_sequences(kind: Any, precision: str, tolerance: float) -> None:
    run = partial(fit, of_transformers("LlamaForCausalLM", kind, **DECODER), precision=precision)
    assert_same_in_processes(2, {"run": run}, {"run": partial(run, fsdp(context=2), 2)}, tolerance)


# Accumulation windows

PLAN = {"network.perceptron.1": "colwise", "network.perceptron.3": "rowwise"}
# The options of the strategy, and the number of processes.
MESHES: dict[str, tuple[dict[str, Any] | None, int]] = {
    "one device": (None, 1),
    "context 2": ({"context": 2}, 2),
    "context 2 x tensor 2": ({"context": 2, "tensor": 2, "tensor_plan": PLAN}, 4),
    "both, in folders": ({"context": 2, "tensor": 2, "tensor_plan": PLAN, "checkpoints": "sharded"}, 4),
}


def run(kind: Any, mesh: str, **options: Any) -> dict[str, Any]:
    strategy, processes = MESHES[mesh]
    chosen = "single_device" if strategy is None else fsdp(**strategy)
    options = {"accumulate_grad_batches": 2, "max_epochs": 1, **options}
    return fit(lambda: kind(Gpt()), chosen, processes, **options)


@pytest.mark.parametrize(
    ("kind", "writer", "reader"),
    [
        (Task, "context 2 x tensor 2", "context 2"),
        (Weighted, "both, in folders", "one device"),
    ],
)
def test_a_run_continues_within_a_window_on_another_mesh(kind: Any, writer: str, reader: str, tmp_path: Path) -> None:
    """Three batches were seen, of which the last has begun a window."""
    path = tmp_path / "open.ckpt"
    run(kind, writer, callbacks=[SavesAfter(path, 2)])
    assert_close(run(kind, "one device"), run(kind, reader, ckpt_path=path), tolerance=1e-10)


class Middle(Weighted):
    """Has labels in the middle alone, which the first of two processes does not have."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        labels = batch["shift_labels"].clone()
        labels[:, :5] = labels[:, 11:] = -100
        return {**batch, "shift_labels": labels}


def test_a_process_without_weight_counts_for_nothing() -> None:
    runs = [{"weighted": partial(run, Middle, mesh)} for mesh in ("one device", "context 2")]
    assert_same_in_processes(2, *runs, tolerance=1e-10)


# What is refused


class ByHand(Attention):
    """Attention that is no function of torch."""

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        keys = self.keys(hidden)
        scores = self.queries(hidden) @ keys.transpose(1, 2)
        later = torch.ones(hidden.size(1), hidden.size(1), dtype=torch.bool).triu(1)
        return hidden + self.output(scores.masked_fill(later, -torch.inf).softmax(-1) @ keys)


class Windowed(Attention):
    """A mask that is neither causal nor one of keys."""

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        near = torch.ones(hidden.size(1), hidden.size(1), dtype=torch.bool).tril().triu(-1)
        query = self.queries(hidden)
        return hidden + self.output(functional.scaled_dot_product_attention(query, query, query, near))


class Shifting(Task):
    """Shifts the labels in the step."""

    def loss(self, batch: Any) -> Tensor:
        logits = self.network(batch)[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


class Measuring(Task):
    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.mean = MeanMetric()

    def training_step(self, batch: Any) -> Any:
        self.mean(batch["number"])
        return super().training_step(batch)


class Manual(Task):
    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.automatic_optimization = False


class SkippedInOne(Task):
    """Returns no loss in one process of a row."""

    def training_step(self, batch: Any) -> Any:
        output = super().training_step(batch)
        return None if batch["position_ids"][0, 0] else output


def with_attention(kind: type[Attention]) -> Callable[[], Task]:
    def make() -> Task:
        network = Gpt()
        network.blocks = nn.ModuleList([kind("causal")])
        return Task(network)

    return make


REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "attention by hand": (with_attention(ByHand), ["ConfigurationError: ", "compute attention by torch's `scaled_dot"]),
    "counted positions": (
        lambda: Task(CountedPositions()),
        ["ConfigurationError: ", "Take positions from `position_ids`"],
    ),
    "labels shifted in the step": (lambda: Shifting(Gpt()), ["ConfigurationError: ", "shift labels in the data"]),
    "a window": (
        with_attention(Windowed),
        ["StepError: ", "has a mask of shape [8, 8], where each process has 8 of 16"],
    ),
    "a metric": (lambda: Measuring(Gpt()), ["StepError: `training_step` has updated a metric"]),
    "by hand": (lambda: Manual(Gpt()), ["ConfigurationError: ", "which manual optimisation does not"]),
    "skipped in one": (lambda: SkippedInOne(Gpt()), ["StepError: ", "returned None in some of the 2 processes"]),
}


def test_what_cannot_be_computed_on_parts_of_sequences_is_refused() -> None:
    runs = {case: partial(fit, make, fsdp(context=2), 2) for case, (make, _) in REFUSED.items()}
    assert_refused_in_processes(2, runs, REFUSED)
