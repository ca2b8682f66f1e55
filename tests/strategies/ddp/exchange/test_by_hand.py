"""Steps by hand in several processes: gradients by any road, and processes that do different things."""

import contextlib
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from equipoise import DDPStrategy, StepError
from tests.strategies.ddp.exchange.programs_by_hand import PROGRAMS, ByHand
from tests.support.equality import assert_equal, differences
from tests.support.pipelines import quiet

pytestmark = pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph=True")


def data(count: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    x, y = torch.randn(count, 4, generator=draw).double(), torch.randn(count, 2, generator=draw).double()
    return TensorDataset(x, y, torch.arange(count))


def weights_of(make: type[ByHand], strategy: Any, processes: int, count: int, batch_size: int) -> list[torch.Tensor]:
    """The weights after two epochs."""
    module = make()
    trainer = quiet(strategy=strategy, devices=["cpu"] * processes, max_epochs=2, precision="64-true")
    trainer.fit(module, DataLoader(data(count), batch_size=batch_size))
    return [parameter.detach() for parameter in module.parameters()]


IN_THREE_PROCESSES = ("plain", "assigned", "penalty", "sharpness", "unused", "Limited", "Adversaries")


def assert_as_on_one_device(name: str, processes: int) -> None:
    """Train a program in processes and on one device, with an uneven last batch, and compare."""
    count = 4 * processes * 3 + 2 * processes - 1
    one = weights_of(PROGRAMS[name], "single_device", 1, count, 3 * processes)
    assert any(differences(one, [weight.detach() for weight in PROGRAMS[name]().parameters()], tolerance=1e-3))
    assert_equal(one, weights_of(PROGRAMS[name], "ddp", processes, count, 3), 1e-12)


OF_SAMPLES = ("penalised_inputs", "clipped_samples")


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("Missing", "Limited", *OF_SAMPLES)])
def test_gradients_by_autograd_grad_and_other_functions_are_those_of_one_device(name: str) -> None:
    assert_as_on_one_device(name, 3 if name in IN_THREE_PROCESSES else 2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OF_SAMPLES)
def test_gradients_of_samples_and_those_by_torch_func_grad_are_of_their_process(name: str) -> None:
    assert_as_on_one_device(name, 2)


@pytest.mark.thorough
def test_lbfgs_by_hand_receives_the_mean_loss_of_all_processes() -> None:
    assert_as_on_one_device("Limited", 3)


@pytest.mark.thorough
def test_a_step_by_hand_without_a_backward_in_one_process_joins_the_others() -> None:
    assert_as_on_one_device("Missing", 2)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", ["penalty", "sharpness", "Limited"])
def test_a_process_counts_as_much_as_it_has_samples(name: str) -> None:
    one = weights_of(PROGRAMS[name], "single_device", 1, 16, 6)
    assert_equal(one, weights_of(PROGRAMS[name], DDPStrategy(shares=[1, 2]), 2, 16, 3), 1e-12)


class Adapts(ByHand):
    """Takes gradients in its evaluation too, where processes have other numbers of batches."""

    def gradients(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.loss([tensor.clone() for tensor in batch]).backward()
        self.zero_grad()


def test_an_evaluation_exchanges_nothing() -> None:
    trained = []
    for strategy, processes in (("single_device", 1), ("ddp", 2)):
        module = Adapts()
        trainer = quiet(strategy=strategy, devices=["cpu"] * processes, precision="64-true", inference_mode=False)
        validation = DataLoader(data(9), batch_size=3)
        trainer.fit(module, DataLoader(data(12), batch_size=6 // processes), validation)
        trained.append([parameter.detach() for parameter in module.parameters()])
    assert_equal(*trained, 1e-12)


# What cannot be as on one device


def extra_backward(self: ByHand, batch: Any, batch_idx: int) -> None:
    optimizer = self.optimizers()
    for _ in range(1 + self.global_rank):
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


def no_step(self: ByHand, batch: Any, batch_idx: int) -> None:
    self.loss(batch).backward()
    if batch_idx != 1 or self.global_rank:
        self.optimizers().step()


def clips_alone(self: ByHand, batch: Any, batch_idx: int) -> None:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    if self.global_rank:
        self.loss(batch).backward()
    torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)
    optimizer.step()


def assigned_from_elsewhere(self: ByHand, batch: Any, batch_idx: int) -> None:
    optimizer = self.optimizers()
    for parameter in self.parameters():
        parameter.grad = torch.full_like(parameter, batch[0].mean().item())
    optimizer.step()


def parameters_by_rank(self: ByHand, batch: Any, batch_idx: int) -> None:
    optimizer = self.optimizers()
    torch.autograd.grad(self.loss(batch), self.weights[: 2 + self.global_rank])
    optimizer.step()


def graph_by_rank(self: ByHand, batch: Any, batch_idx: int) -> None:
    """One process alone takes a second backward through gradients."""
    loss = self.loss(batch)
    gradients = torch.autograd.grad(loss, self.weights, create_graph=True)
    if self.global_rank:
        loss = loss + gradients[0].square().sum()
    loss.backward()
    self.optimizers().step()


def caught(self: ByHand, batch: Any, batch_idx: int) -> None:
    """An error in a backward of one process, which goes on."""

    def fails(gradient: torch.Tensor) -> None:
        if batch_idx == 1 and self.global_rank:
            raise ValueError("on purpose")

    loss = self.loss(batch)
    self.net[0].weight.register_hook(fails)
    with contextlib.suppress(ValueError):
        loss.backward()
    self.optimizers().step()


REFUSED = {
    extra_backward: r"process 0 has ended its `training_step`; process 1 (runs a backward|steps an opt).*manual_backw",
    no_step: r"process 0 has ended its `training_step`; process 1 has ended its `training_step`, after other",
    clips_alone: r"different gradients before the step.*`self.manual_backward` in all processes",
    assigned_from_elsewhere: r"different gradients before the step.*self.all_gather",
    parameters_by_rank: r"process 1 computes gradients by `torch.autograd.grad`, but another one",
    graph_by_rank: r"process 0 steps an optimiser; process 1 runs a backward through gradients",
    caught: r"A backward has failed while its gradients were exchanged",
}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("step", REFUSED, ids=lambda step: step.__name__)
def test_steps_by_hand_that_differ_between_processes_end_the_run_in_all(step: Any) -> None:
    make = type(step.__name__, (ByHand,), {"training_step": step})
    with pytest.raises(StepError, match=REFUSED[step]):
        weights_of(make, DDPStrategy(timeout=60), 2, 12, 3)
