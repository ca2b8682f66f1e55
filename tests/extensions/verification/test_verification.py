"""`Trainer(verify=N)`: healthy programs are those of one device, what is wrong is named, and nothing stays."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Callback, HogwildStrategy, PipelineStrategy, StepError, Trainer, VirtualDevicesStrategy
from tests.support.equality import assert_equal
from tests.support.trainer_runs import refuses, trainer

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules")

CPUS = ["cpu", "cpu"]


class Perceptron(L.LightningModule):
    """Two layers, with statistics of a batch, random numbers or tied weights as they are asked for.

    Args:
        options: "norm", "dropout", "noise", "chosen" or "tied".
    """

    backward_of: Any = "self.manual_backward"

    def __init__(self, *options: str, by_hand: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = not by_hand
        self.options = options
        self.temperature = 0.5
        norm = nn.BatchNorm1d(4) if "norm" in options else nn.Identity()
        self.net = nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh(), nn.Dropout(0.3 * ("dropout" in options)))
        self.head = nn.Linear(4, 4)
        if "tied" in options:
            self.head.weight = self.net[0].weight

    def loss(self, batch: Any) -> Tensor:
        features, targets = batch
        if "noise" in self.options:
            features = features + torch.randn_like(features)
        if "chosen" in self.options:
            features = features + torch.multinomial(features.softmax(1), 1) * (1 / self.temperature)
        return F.mse_loss(self.head(self.net(features)), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.differentiate(loss)
            optimizer.step()
        return loss

    def differentiate(self, loss: Tensor) -> None:
        self.manual_backward(loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Plain(Perceptron):
    def differentiate(self, loss: Tensor) -> None:
        loss.backward()


class Written(Perceptron):
    def differentiate(self, loss: Tensor) -> None:
        parameters = list(self.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient


class Clamped(Perceptron):
    """Changes weights within the step, also of shards."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


class Two(Perceptron):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.Adam(self.head.parameters(), lr=0.01)]


def loader() -> DataLoader[Any]:
    """Batches of 8 samples and a last one of 6."""
    draw = torch.Generator().manual_seed(3)
    features = torch.randn(30, 4, generator=draw, dtype=torch.float32)
    return DataLoader(TensorDataset(features, features.roll(1, 1)), batch_size=8, shuffle=True)


def run(module: L.LightningModule, capsys: Any = None, **options: Any) -> str:
    """Fit for an epoch, of which two steps are verified, and return what was printed."""
    torch.manual_seed(1)
    trainer(**{"verify": 2, **options}).fit(module, loader())
    return "".join(capsys.readouterr()) if capsys is not None else ""


EXACT, ROUNDED, DRAWN = "one device, to the bit", "one device, within rounding", "but for random numbers"
ONE = {"devices": 1}
DDP = {"strategy": "ddp", "devices": 2}
FSDP = {"strategy": "fsdp", "devices": 2}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (Perceptron("norm", "dropout", "noise"), ONE, ROUNDED),
        (Perceptron("norm", "dropout"), {"strategy": "dp", "devices": CPUS}, DRAWN),
        (Perceptron("chosen", "dropout"), {"strategy": "dp", "devices": CPUS}, DRAWN),
        (Perceptron("norm"), {"strategy": "balanced", "devices": CPUS, "accumulate_grad_batches": 3}, DRAWN),
        (Perceptron(), {"strategy": PipelineStrategy(schedule="gpipe"), "devices": CPUS}, ROUNDED),
        (Perceptron("dropout"), ONE | {"step_in_backward": True}, ROUNDED),
        (Perceptron("dropout"), ONE | {"activation_checkpointing": ["net"]}, ROUNDED),
        (Perceptron(by_hand=True), ONE | {"precision": "bf16-mixed"}, ROUNDED),
        (Perceptron("norm", "dropout"), {"strategy": VirtualDevicesStrategy(count=2), "devices": CPUS}, EXACT),
        (Perceptron("tied"), DDP, ROUNDED),
        (Plain(by_hand=True), DDP, ROUNDED),
        (Written("dropout", by_hand=True), DDP, DRAWN),
        pytest.param(Two("noise"), DDP | {"accumulate_grad_batches": 2}, DRAWN, marks=pytest.mark.slow),
        pytest.param(Perceptron("norm"), DDP | {"precision": "16-mixed"}, DRAWN, marks=pytest.mark.slow),
        (Perceptron("dropout"), FSDP, DRAWN),
        (Clamped(), FSDP, ROUNDED),
        pytest.param(
            Perceptron("dropout"),
            {"strategy": PipelineStrategy(engine="processes"), "devices": CPUS},
            ROUNDED,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_verify_finds_the_first_steps_equal_to_one_device(
    module: Any, options: dict[str, Any], expected: str, capsys: Any, caplog: Any
) -> None:
    caplog.set_level("INFO")
    printed = run(module, capsys, **options)
    assert expected in printed + caplog.text


class ScaledByRank(Perceptron):
    """A branch by rank in the backward alone."""

    def differentiate(self, loss: Tensor) -> None:
        if self.global_rank == 0:
            loss = 2 * loss
        loss.backward()


class Summed(Perceptron):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * len(batch[0])


class Shifted(Perceptron):
    """Each process adds a number of its own to its shards."""

    def differentiate(self, loss: Tensor) -> None:
        super().differentiate(loss)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.1 * self.global_rank)


class Taught(Perceptron):
    """Each process has a frozen teacher of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 4).requires_grad_(requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.add_(batch[0].mean())
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([*self.net.parameters(), *self.head.parameters()], lr=0.01)


class Skipping(Perceptron):
    """Several processes step after the first batch alone, though no step changes a weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx and self.trainer.world_size > 1:
            return None
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class WrongSaver(Callback):
    """Loses a part of a layer's gradient."""

    saves_memory = True

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] / 2,))


class Scaling(Perceptron):
    """Rounds by the rank."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + 2**-20 * self.global_rank)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("module", "options", "texts"),
    [
        (ScaledByRank(by_hand=True), DDP, ("in step 1 the gradient 'net.0.weight' differs", "a branch by rank")),
        (Summed("dropout"), DDP, ("in step 1 the loss differs by", "a sum in the place of a mean")),
        (Shifted(by_hand=True), FSDP, ("after step 1 the weight 'net.0.weight' differs", "all_gather(value).mean(0)")),
        (Taught(), FSDP, ("after step 1 the weight 'teacher.weight' differs", "changed outside of the optimiser")),
        (Skipping(by_hand=True), DDP, ("after step 1 the number of optimiser steps differs", "depend on `batch_idx`")),
        (Perceptron(), ONE | {"callbacks": [WrongSaver()]}, ("the gradient 'net.0.weight'", "Leave out WrongSaver")),
        (Scaling(), {"strategy": VirtualDevicesStrategy(count=2), "devices": CPUS}, ("the loss", "deterministic=True")),
    ],
)
def test_what_is_wrong_is_named(module: Any, options: dict[str, Any], texts: tuple[str, ...]) -> None:
    with pytest.raises(StepError) as caught:
        run(module, **options)
    assert [text for text in texts if text not in str(caught.value)] == []


class OfProcesses(Perceptron):
    """Calls a function of processes."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) / torch.distributed.get_world_size()


@pytest.mark.parametrize(
    ("module", "options", "reason"),
    [
        (Perceptron(), {"strategy": HogwildStrategy(processes=1), "devices": 1}, "processes of hogwild"),
        pytest.param(OfProcesses(), DDP, "there the steps fail", marks=pytest.mark.slow),
    ],
)
def test_a_program_that_cannot_be_compared_is_fitted(module: Any, options: dict[str, Any], reason: str) -> None:
    """The fit follows."""
    with pytest.warns(UserWarning, match=f"Not compared with one device: {reason}"):
        run(module, **options)
    assert module.trainer.state.finished


@pytest.mark.parametrize("options", [ONE, pytest.param(DDP, marks=pytest.mark.slow)])
def test_a_verified_run_ends_with_the_weights_of_one_that_is_not(options: dict[str, Any]) -> None:
    modules = []
    for verify in (0, 2):
        module = Perceptron("norm", "dropout", "noise")
        run(module, verify=verify, **options)
        modules.append(module)
    assert_equal(*modules)


def test_wrong_arguments() -> None:
    for value in (-1, 0.5, None):
        make: Callable[[], Any] = lambda value=value: Trainer(verify=value)  # noqa: E731
        refuses(make, "verify must be an integer of at least 0", repr(value))
