"""Refusals of what cannot be computed on parts of sequences, in all processes with one message."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests.extensions.fsdp.context.networks import Attention, CountedPositions, Gpt, Task, fit
from tests.extensions.fsdp.programs import assert_refused_in_processes, fsdp


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
        return hidden + self.output(nn.functional.scaled_dot_product_attention(query, query, query, near))


class Shifting(Task):
    """Shifts the labels in the step."""

    def loss(self, batch: Any) -> Tensor:
        logits = self.network(batch)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


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


class UnequalDims(Task):
    """Says which entries are divided, of which one is shorter."""

    def context_dims(self, batch: Any) -> dict[str, int]:
        return {"input_ids": 1, "number": 0}


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
    "unequal lengths": (
        lambda: UnequalDims(Gpt()),
        ["StepError: ", "divides 'number' along dimension 0, whose length is 4"],
    ),
}


@pytest.mark.slow
def test_what_cannot_be_computed_on_parts_of_sequences_is_refused() -> None:
    runs = {case: partial(fit, make, fsdp(context=2), 2) for case, (make, _) in REFUSED.items()}
    assert_refused_in_processes(2, runs, {case: words for case, (_, words) in REFUSED.items()})
