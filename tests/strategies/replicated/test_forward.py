"""Replicas of the forward alone: the step runs once, and its call of the module is divided."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import BalancedDataParallelStrategy, StepError
from tests.strategies.replicated.classifier import (
    CLASSES,
    Module,
    Seen,
    assert_trains_alike,
    fitted,
    in_forward,
)
from tests.support.equality import assert_equal


def test_the_step_runs_once_and_forward_in_parts() -> None:
    class Counting(Module):
        def forward(self, features: Tensor) -> Any:
            sizes.append(len(features))
            return {"deep": [(super().forward(features), torch.tensor(1.0))], "name": "net"}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self(batch[0])
            assert out["name"] == "net"
            assert out["deep"][0][1].shape == (2,)  # as nn.DataParallel gathers
            return nn.functional.cross_entropy(out["deep"][0][0], batch[1])

    sizes: list[int] = []
    fitted(Counting, in_forward(2, output_device=1), max_epochs=1)
    assert sizes == [4, 3, 4, 3, 3, 2, 1, 1]


# Losses of the forward, one for each part


class LossInForward(Module):
    """Computes its loss inside of `forward`, as models of transformers do."""

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(features)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(*batch)["loss"].mean()


class OneLossForEachPart(LossInForward):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(*batch)["loss"]


class LossOfLogits(LossInForward):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(*batch)["logits"], batch[1])


class WithoutForward(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (LossInForward, r"for each part of the batch \(its output\['loss'\]\)"),
        (WithoutForward, r"did not call the module.*parallelize='step'"),
    ],
)
def test_a_step_whose_result_depends_on_the_parts_is_noticed_once(make: type[Module], message: str) -> None:
    with pytest.warns(UserWarning, match=message) as caught:
        fitted(make, in_forward(2))
    assert len(caught) == 1


def test_scalars_beside_the_loss_are_no_reason_for_a_warning() -> None:
    fitted(LossOfLogits, in_forward(2))


class StateBesideTheBatch(Module):
    def forward(self, features: Tensor, state: Any = None) -> Tensor:
        return super().forward(features)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0], state=torch.zeros(3, len(batch[0]))).square().mean()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OneLossForEachPart, r"one loss for each of 2 parts.*after the call of the module.*'step'"),
        (StateBesideTheBatch, r"argument\[1\]\['state'\] is of length 3.*parallelize='step'"),
    ],
)
def test_calls_that_cannot_be_divided_are_refused_with_advice(make: type[Module], message: str) -> None:
    with pytest.raises(StepError, match=message):
        fitted(make, in_forward(2))


# What a forward logs and measures


class CallsForwardAgain(Module):
    """After it has measured and logged, within the forward and outside of it."""

    def forward(self, features: Tensor) -> Tensor:
        logits = super().forward(features)
        if self.training:
            self.log("inner", logits.square().mean(), on_step=True, on_epoch=True)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.accuracy(self(batch[0]), batch[1])
        self(batch[0])
        self.log("accuracy", self.accuracy, on_step=True)
        return loss


def test_metrics_keep_their_values_and_forward_logs_once_when_it_is_called_again() -> None:
    one, many = (fitted(CallsForwardAgain, of, callbacks=[Seen()]) for of in (("single_device", 1), in_forward()))
    assert_equal(one.trainer.callbacks[0].batches, many.trainer.callbacks[0].batches, 1e-12)
    logged = (dict(module.trainer.callback_metrics) for module in (one, many))
    assert_equal(*logged, 1e-12)


# Gradients by hand


class Penalised(Module):
    """Takes gradients in every way that a step may."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs = batch[0].clone().requires_grad_()
        logits = self(inputs)
        loss = nn.functional.cross_entropy(logits, batch[1])
        (slope,) = torch.autograd.grad(logits.square().sum(), inputs, create_graph=True)
        weights = list(self.net.parameters())
        norms = torch.autograd.grad(loss, weights, create_graph=True)
        return loss + 0.1 * slope.square().mean() + 0.1 * sum(norm.square().sum() for norm in norms)


class Recurrent(Module):
    """Parameters in a flat list of the module's own, one of them frozen, and a hook on another."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.lstm.bias_hh_l0.requires_grad_(False)
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(self.lstm(features.unsqueeze(1))[0][:, -1])


class Adversaries(Module):
    """A graph that is older than a step: of a generator, when the discriminator has stepped in between.

    Neither asks the trainer for the backward of one, nor for clipping.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(CLASSES, 1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.critic)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        made = self(batch[0])
        second.zero_grad()
        self.critic(made.detach()).square().mean().backward()
        nn.utils.clip_grad_norm_(self.critic.parameters(), 0.01)
        second.step()
        first.zero_grad()
        self.manual_backward((self.critic(made) * self(batch[0]).detach()).mean())
        first.step()


class ThroughData(torch.optim.SGD):
    """Steps through `.data`, which leaves no trace."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(0.1 * parameter.grad)


class Twice(Module):
    """Steps twice for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return ThroughData(self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            self.zero_grad()
            self.manual_backward(self(batch[0]).square().mean())
            self.optimizers().step()


@pytest.mark.parametrize(
    ("make", "shares"),
    [(Penalised, [0, 1, 2]), (Recurrent, [2, 1, 1]), (Adversaries, [1, 1, 1]), (Twice, [1, 1])],
)
def test_gradients_taken_by_hand_are_those_of_one_device(make: type[Module], shares: list[int]) -> None:
    assert_trains_alike(make, (BalancedDataParallelStrategy(shares=shares, parallelize="forward"), len(shares)))
