"""Refusals of what cannot be computed on parts of sequences, in all processes with one message."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests.extensions.fsdp.context.networks import Attention, Gpt, Task, fit
from tests.extensions.fsdp.programs import errors_of, fsdp, in_processes


class ByHand(Attention):
    """Attention that is no function of torch."""

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        keys = self.keys(hidden)
        scores = self.queries(hidden) @ keys.transpose(1, 2)
        later = torch.ones(hidden.size(1), hidden.size(1), dtype=torch.bool).triu(1)
        return hidden + self.output(scores.masked_fill(later, -torch.inf).softmax(-1) @ keys)


class CountedPositions(Gpt):
    """Positions from the length of the input."""

    def embed(self, batch: Any) -> Tensor:
        positions = torch.arange(batch["input_ids"].size(1))
        return self.tokens(batch["input_ids"]) + self.positions(positions)


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


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "attention by hand": (with_attention(ByHand), "ConfigurationError: .*compute attention by torch's `scaled_dot"),
    "counted positions": (lambda: Task(CountedPositions()), "ConfigurationError: .*Take positions from `position_ids`"),
    "labels shifted in the step": (lambda: Shifting(Gpt()), "ConfigurationError: .*shift labels in the data"),
    "a window": (
        with_attention(Windowed),
        r"StepError: .*has a mask of shape \[8, 8\], where each process has 8 of 16",
    ),
    "a metric": (lambda: Measuring(Gpt()), "StepError: `training_step` has updated a metric"),
    "by hand": (lambda: Manual(Gpt()), "ConfigurationError: .*which manual optimisation does not"),
    "skipped in one": (lambda: SkippedInOne(Gpt()), "StepError: .*returned None in some of the 2 processes"),
    "unequal lengths": (
        lambda: UnequalDims(Gpt()),
        "StepError: .*divides 'number' along dimension 0, whose length is 4",
    ),
}


def messages() -> dict[str, Any]:
    """Return the errors, in every process the same."""
    found = errors_of({case: partial(fit, make, fsdp(context=2), 2) for case, (make, _) in REFUSED.items()})
    of_all: list[Any] = [None, None]
    torch.distributed.all_gather_object(of_all, found)
    assert of_all[0] == of_all[1]
    return found


@pytest.mark.slow
def test_what_differs_is_refused() -> None:
    found = in_processes(2, messages)
    for case, (_, words) in REFUSED.items():
        assert re.match(words, found[case]), found[case]
