"""Backwards in two parts in a trainer: whatever a step does with the output, and whoever looks at gradients."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equipoise import ConfigurationError, PipelineStrategy
from tests.extensions.pipeline.strategy.test_pipeline import SIZES, Dropping, reference
from tests.support.batches import CLASSES, FEATURES
from tests.support.networks.transparency import Base, Mlp
from tests.support.one_device import assert_same_run
from tests.support.pipelines import Tokens, fit, pipelined, stay_whole


def zero(devices: int = 2, each: int = 2, strategy: Any = PipelineStrategy, **options: Any) -> dict[str, Any]:
    given = {"schedule": "interleaved_zero_bubble", "stages_per_device": each, "micro_batches": 4, **options}
    return pipelined(devices, strategy, **given)


class InTheStep(Base):
    """The step changes the output in place, uses it twice, and what was computed before once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 6)
        self.net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
        self.head = nn.Linear(6, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = torch.tanh(self.first(batch["features"].mean(1)))
        made = self.net(hidden)
        made *= 2
        made[:, 0] = 0
        more = self.head(made + hidden) + made.sum(1, keepdim=True)
        return nn.functional.cross_entropy(more, batch["label"]) + hidden.square().mean()


class Hooked(Base):
    """Hooks on gradients of weights and of activations, and frozen layers."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(30, 30)
            self.layer.weight.register_hook(lambda gradient: gradient * 3)

        def forward(self, x: Any) -> Any:
            stay_whole(x)
            made = torch.tanh(self.layer(x))
            if made.requires_grad:
                made.register_hook(lambda gradient: gradient * 0.5)
            return made

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), *(self.Block() for _ in range(5)), nn.Linear(30, CLASSES))
        self.net[2].requires_grad_(False)

    def forward(self, features: Any) -> Any:
        return self.net(features)


class Repeating(Base):
    """Blocks that compute their activations again, as users write it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 30))

        def forward(self, x: Any) -> Any:
            stay_whole(x)
            return checkpoint(self.inner, x, use_reentrant=False)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), *(self.Block() for _ in range(4)), nn.Linear(30, CLASSES))

    def forward(self, features: Any) -> Any:
        return self.net(features)


class Beside(Base):
    """The loss takes something of the last stage that is no output: what a layer has kept."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(30, 30), nn.Linear(30, CLASSES)

        def forward(self, x: Any) -> Any:
            stay_whole(x)
            self.kept = torch.tanh(self.first(x))
            return self.second(self.kept)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), *(nn.Linear(30, 30) for _ in range(3)), self.Last())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["features"])
        return nn.functional.cross_entropy(logits, batch["label"]) + self.net[-1].kept.square().mean()


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class Unusual(Base):
    """The output is an object, which nobody can look into; so is part of it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), *(nn.Linear(30, 30) for _ in range(4)))
            self.wrap = Unusual.Wrap()

        def forward(self, x: Any) -> Any:
            return self.wrap(self.layers(x))

    class Wrap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(30, CLASSES)

        def forward(self, x: Any) -> Any:
            stay_whole(x)
            logits = self.head(x)
            return Output(logits, x), logits

    def __init__(self) -> None:
        super().__init__()
        self.net = self.Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        made, logits = self.net(batch["features"])
        loss = nn.functional.cross_entropy(made.logits + logits, batch["label"])
        return loss + made.hidden.square().mean()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("threads", [None, True])
@pytest.mark.parametrize("make", [InTheStep, Hooked, Repeating, Beside, Unusual])
def test_steps_and_hooks(make, threads):
    assert_same_run(reference(make), fit(make, SIZES, **zero(threads=threads)))


def test_the_same_as_with_whole_backwards_to_the_bit():
    """With dropout, whose masks follow from the order of forwards: all at once at first, since there are few."""
    cut = {"cut_before": ["net.2", "net.3", "net.4.1"], "micro_batches": 2}
    runs = [fit(Dropping, SIZES, **zero(**cut)), fit(Dropping, SIZES, **zero(**cut))]
    assert_same_run(*runs, 0.0)
    whole = fit(Dropping, SIZES, **zero(**cut, schedule="interleaved_1f1b"))
    assert_same_run(whole, runs[0], 0.0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision(precision):
    """A weight that is cast once for several uses."""
    options = {"precision": precision, "max_epochs": 1}
    expected = fit(Tokens, [8, 8], **options, **zero(schedule="interleaved_1f1b"))
    assert_same_run(expected, fit(Tokens, [8, 8], **options, **zero()), 1e-2)
    one = fit(Mlp, [8, 8], **options)
    assert_same_run(one, fit(Mlp, [8, 8], **options, **zero(1, 2, micro_batches=1)), 1e-6)


def test_activation_checkpointing_is_refused():
    with pytest.raises(
        ConfigurationError, match="for each of which activation_checkpointing would compute the forward"
    ):
        fit(Mlp, SIZES, activation_checkpointing=["net.*"], **zero())
