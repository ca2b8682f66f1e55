"""Activation functions in place: where nothing needs their input, with the same numbers, and nowhere else."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.extensions.savers.inplace import keep_inputs, use_inplace_activations
from equipoise.memory.profile.ledger import Ledger
from tests.support.equality import assert_equal
from tests.support.trainer_runs import refuses

KINDS = [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid]
# Torch computes their gradient from the output instead, and rounds in another way.
ROUNDING_DIFFERENTLY = [nn.ELU, nn.CELU]


class Network(nn.Module):
    """Activation functions whose input nothing needs, and others, each for another reason."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.safe = nn.ReLU()
        self.residual = nn.SiLU()
        self.after_exp = nn.ReLU()
        self.stored = nn.LeakyReLU()
        self.of_batch = nn.ReLU()
        self.shared = nn.ELU()
        self.unused = nn.ReLU()
        self.latest: Tensor | None = None

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.safe(self.first(self.of_batch(batch)))
        raw = hidden * 1.5
        hidden = raw + self.residual(raw)
        self.latest = self.after_exp(hidden.exp()) * 0.05
        once = self.stored(self.latest) * 2
        return self.shared(once) * self.shared(once)


def test_reasons_why_an_activation_function_stays_out_of_place() -> None:
    network = Network()
    # Positive numbers only: what is wrong for others would not show in these.
    batch = torch.rand(3, 4)
    before = batch.clone()
    choice = use_inplace_activations(network, lambda: network(batch).square().mean())
    assert choice.changed == ("safe",)
    reasons = {
        "residual": "its input is used afterwards, by add",
        "after_exp": "modified by an inplace operation",
        "stored": "its input is kept after the step",
        "of_batch": "its input is kept after the step",
        "shared": "its input is used afterwards, by elu",
        "unused": "it was not called in this step",
    }
    assert choice.unchanged.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert reason in choice.unchanged[name], (name, choice.unchanged[name])
    assert [name for name, part in network.named_modules() if getattr(part, "inplace", False)] == ["safe"]
    assert torch.equal(batch, before)
    assert all(parameter.grad is None for parameter in network.parameters())
    assert network.latest is None
    keep_inputs(network, choice.changed)
    assert not network.safe.inplace


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_gradients_of_every_kind_are_equal_to_the_bit(kind: Any) -> None:
    network = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), kind(), nn.Linear(8, 8), kind(), nn.Linear(8, 1)
    ).double()
    state = {name: value.clone() for name, value in network.state_dict().items()}
    batch = torch.randn(16, 4, dtype=torch.float64)

    def gradients() -> list[Tensor]:
        network.load_state_dict(state)
        return list(torch.autograd.grad(network(batch).square().mean(), list(network.parameters())))

    usual = gradients()
    choice = use_inplace_activations(network, lambda: {"loss": network(batch).square().mean()})
    assert choice.changed == ("2", "4")
    assert_equal(state, dict(network.state_dict()), ignore=["mean", "var", "tracked"])
    assert_equal(usual, gradients())


@pytest.mark.parametrize("kind", ROUNDING_DIFFERENTLY, ids=lambda kind: kind.__name__)
def test_a_kind_that_rounds_in_another_way_stays_as_it_is(kind: Any) -> None:
    network = nn.Sequential(nn.Linear(4, 64), kind(), nn.Linear(64, 1)).double()
    batch = torch.randn(64, 4, dtype=torch.float64)
    choice = use_inplace_activations(network, lambda: network(batch).square().mean())
    assert choice.unchanged == {"1": "the loss or a gradient differs"}
    assert not network[1].inplace


def peak_of(network: nn.Module, batch: Tensor) -> int:
    ledger = Ledger(network)
    ledger.start()
    loss = network(batch).square().mean()
    ledger.begin("backward")
    loss.backward()
    ledger.stop()
    network.zero_grad()
    return ledger.peak("cpu").nbytes


def test_the_peak_is_less_by_a_tensor_for_each_activation() -> None:
    network = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.LeakyReLU()) for _ in range(6)))
    batch = torch.rand(8, 4, 16, 16)
    before = peak_of(network, batch)
    use_inplace_activations(network, lambda: network(batch).square().mean())
    assert before - peak_of(network, batch) >= 5 * batch.nbytes


def test_a_step_that_is_not_repeatable_changes_nothing() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    counts = iter(range(10))
    choice = use_inplace_activations(network, lambda: network(torch.ones(1, 2)).sum() * next(counts))
    assert choice.changed == ()
    assert "other numbers" in choice.unchanged["1"]
    assert not network[1].inplace


def test_without_a_candidate_no_step_is_run() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.GELU())
    choice = use_inplace_activations(network, lambda: pytest.fail("needs no step"))
    assert (choice.changed, dict(choice.unchanged)) == ((), {})


@pytest.mark.parametrize("output", [None, 1.0, torch.ones(()), {"value": 1}])
def test_a_step_without_a_loss_is_refused(output: Any) -> None:
    network = nn.Sequential(nn.ReLU())
    refuses(lambda: use_inplace_activations(network, lambda: output), "returns its loss with a graph")
