"""Backwards in two parts in a trainer: whatever a step does with the output, and whoever looks at gradients."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import ConfigurationError
from tests.extensions.pipeline.strategy.networks import dropping
from tests.support.batches import CLASSES, FEATURES
from tests.support.networks.layers import WIDTH, Task, network
from tests.support.networks.transparency import Mlp
from tests.support.pipelines import Tokens, assert_as_on_one_device, assert_same, fit, pipelined, stay_whole


def zero(devices: int = 2, **options: Any) -> dict[str, Any]:
    return pipelined(devices, **{"schedule": "interleaved_zero_bubble", "micro_batches": 4, **options})


def cross_entropy(logits: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(logits, batch["label"])


def changes_the_output() -> Task:
    """The step changes the output in place, uses it twice, and what was computed before once more."""

    def step(self: Any, batch: Any) -> Tensor:
        hidden = torch.tanh(self.first(batch["features"].mean(1)))
        made = self.net(hidden)
        made *= 2
        made[:, 0] = 0
        return cross_entropy(self.head(made + hidden) + made.sum(1, keepdim=True), batch) + hidden.square().mean()

    module = Task(nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))), step)
    module.first, module.head = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)
    return module


def takes_what_a_layer_has_kept() -> Task:
    """The loss takes something of the last stage that is no output."""

    def forward(self: Any, x: Tensor) -> Tensor:
        stay_whole(x)
        self.kept = torch.tanh(self.first(x))
        return self.second(self.kept)

    def step(self: Any, batch: Any) -> Tensor:
        return cross_entropy(self.net(batch["features"]), batch) + self.net[-1].kept.square().mean()

    last = network(forward, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, CLASSES))
    return Task(nn.Sequential(nn.Flatten(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), last), step)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


def returns_an_object() -> Task:
    """Nobody can look into a part of the output."""

    def wrap(self: Any, x: Tensor) -> Any:
        stay_whole(x)
        logits = self.head(x)
        return Output(logits, x), logits

    def step(self: Any, batch: Any) -> Tensor:
        made, logits = self.net(batch["features"])
        return cross_entropy(made.logits + logits, batch) + made.hidden.square().mean()

    last = network(wrap, head=nn.Linear(WIDTH, CLASSES))
    return Task(nn.Sequential(nn.Flatten(), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)), last), step)


@pytest.mark.quick_cases(2)
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("threads", [None, True])
@pytest.mark.parametrize("make", [changes_the_output, takes_what_a_layer_has_kept, returns_an_object])
def test_steps_may_use_the_output_in_any_way(make, threads):
    assert_as_on_one_device(make, zero(threads=threads))


@pytest.mark.thorough
def test_split_backwards_are_whole_ones_to_the_bit():
    """With dropout, whose masks follow from the order of forwards: all at once at first, since there are few."""
    cut = {"cut_before": ["net.2", "net.3", "net.4.1"], "micro_batches": 2}
    split = fit(dropping, **zero(**cut))
    assert_same(split, fit(dropping, **zero(**cut)), 0.0)
    assert_same(fit(dropping, **zero(**cut, schedule="interleaved_1f1b")), split, 0.0)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision(precision):
    """A weight that is cast once for several uses."""
    options = {"precision": precision, "max_epochs": 1, "sizes": (8, 8)}
    expected = fit(Tokens, **options, **zero(schedule="interleaved_1f1b"))
    assert_same(expected, fit(Tokens, **options, **zero()), 1e-2)
    assert_as_on_one_device(Mlp, zero(1, micro_batches=1), 1e-6, **options)


def test_activation_checkpointing_is_refused():
    with pytest.raises(
        ConfigurationError, match="for each of which activation_checkpointing would compute the forward"
    ):
        fit(Mlp, activation_checkpointing=["net.*"], **zero())
