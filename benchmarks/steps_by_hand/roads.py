"""Programs that come to their gradients by different roads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.steps_by_hand.networks import Automatic, ByHand

__all__ = ["ROADS"]


class PlainBackward(ByHand):
    """`loss.backward()`."""


class ManualBackward(ByHand):
    """`self.manual_backward(loss)`."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        self.manual_backward(self.loss(batch))


class BackwardOfAutograd(ByHand):
    """`torch.autograd.backward`."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        torch.autograd.backward(self.loss(batch))


class AssignedGradients(ByHand):
    """`torch.autograd.grad`, written to `.grad`."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        parameters = list(self.network.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(self.loss(batch), parameters), strict=True):
            parameter.grad = gradient


class AssignedClippedGradients(ByHand):
    """`torch.autograd.grad`, clipped by their norm as new tensors, written to `.grad`."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        parameters = list(self.network.parameters())
        gradients = torch.autograd.grad(self.loss(batch), parameters)
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient / norm.clamp(min=1)


class TwoBackwards(ByHand):
    """Two losses, a plain backward of each."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        self.loss(batch).backward()
        self.network(batch[0]).square().mean().backward()


class TwoKindsOfBackward(ByHand):
    """Two losses: `manual_backward` of one, a plain backward of the other."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        self.manual_backward(self.loss(batch))
        self.network(batch[0]).square().mean().backward()


class RetainedGraph(ByHand):
    """Two backwards through one graph."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        outputs = self.network(batch[0])
        outputs.mean().backward(retain_graph=True)
        (outputs - batch[1]).square().mean().backward()


class Halves(ByHand):
    """The batch in two halves, a backward of each."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        middle = len(batch[0]) // 2
        for half in (slice(None, middle), slice(middle, None)):
            (self.loss([tensor[half] for tensor in batch]) / 2).backward()


class Accumulated(ByHand):
    """Gradients of two batches, then a step."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        (self.loss(batch) / 2).backward()
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


class AccumulatedInAList(ByHand):
    """Gradients of two batches from `torch.autograd.grad`, summed in a list of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[Tensor] = []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        parameters = list(self.network.parameters())
        gradients = torch.autograd.grad(self.loss(batch), parameters)
        before = self.sums or [torch.zeros_like(gradient) for gradient in gradients]
        self.sums = [total + gradient for total, gradient in zip(before, gradients, strict=True)]
        if batch_idx % 2 == 1:
            for parameter, total in zip(parameters, self.sums, strict=True):
                parameter.grad = total / 2
            self.optimizers().step()
            self.sums = []


class Engine:
    """Runs backwards and steps for a program, as accelerators of other libraries do."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def take_step(self, loss: Tensor) -> None:
        """Step on a loss."""
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        self.optimizer.step()


class ByAnEngine(ByHand):
    """An object of the program that runs the backward and the step."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        Engine(self.optimizers()).take_step(self.loss(batch))


class HooksOnGradients(ByHand):
    """Hooks that halve the gradient of each bias."""

    def on_train_start(self) -> None:
        for name, parameter in self.network.named_parameters():
            if name.endswith("bias"):
                parameter.register_hook(lambda gradient: gradient / 2)


class ClosuresOfLBFGS(ByHand):
    """LBFGS, whose closure runs a plain backward several times a step."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.network.parameters(), 0.2, max_iter=3)


class ClosuresWithManualBackward(ClosuresOfLBFGS):
    """LBFGS, whose closure runs `manual_backward`."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


class ConstantLoss(ByHand):
    """A loss that depends on no weight in each second batch."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        if batch_idx % 2 == 1:
            loss = torch.zeros((), requires_grad=True, dtype=loss.dtype)
        loss.backward()
        optimizer.step()


class PartsOfASequence(ByHand):
    """Truncated backpropagation: a sequence in three parts, a backward and a step for each, and a detached state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.network = nn.LSTM(1, 3, batch_first=True)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        sequence = torch.cat([*batch, batch[0] * batch[1]], dim=1)[:, :, None]
        state = None
        for part in sequence.split(3, dim=1):
            outputs, state = self.network(part, state)
            state = tuple(tensor.detach() for tensor in state)
            loss = (outputs.sum(2, keepdim=True) - part).square().mean()
            self.note("loss", loss, len(part))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class PenaltyInTheLoss(Automatic):
    """The norm of all weights in the loss, with the trainer's own optimisation."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) + 0.01 * sum(parameter.square().sum() for parameter in self.network.parameters())


class InnerStep(ByHand):
    """A loss after a step of gradient descent that the outer gradient passes through, as in MAML."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        features, targets = batch
        weights = dict(self.network.named_parameters())
        gradients = torch.autograd.grad(self.loss(batch), list(weights.values()), create_graph=True)
        after = {name: weight - 0.1 * new for (name, weight), new in zip(weights.items(), gradients, strict=True)}
        outputs = torch.func.functional_call(self.network, after, (features,))
        (outputs - targets).square().mean().backward()


class PenaltyOnGradients(ByHand):
    """The squared norm of the gradients of the weights in the loss, by `create_graph=True`."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        loss = self.loss(batch)
        gradients = torch.autograd.grad(loss, list(self.network.parameters()), create_graph=True)
        (loss + 0.01 * sum(gradient.square().sum() for gradient in gradients)).backward()


class PenaltyOnInputs(ByHand):
    """The norm of the gradients of the inputs in the loss, by `create_graph=True`."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        features = batch[0].clone().requires_grad_()
        outputs = self.network(features)
        (slopes,) = torch.autograd.grad(outputs.sum(), features, create_graph=True)
        ((outputs - batch[1]).square().mean() + 0.1 * slopes.square().sum(1).mean()).backward()


class PenaltyOnInputsByTheTrainer(Automatic):
    """The norm of the gradients of the inputs in the loss, with the trainer's own optimisation."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        features = batch[0].clone().requires_grad_()
        outputs = self.network(features)
        (slopes,) = torch.autograd.grad(outputs.sum(), features, create_graph=True)
        return (outputs - batch[1]).square().mean() + 0.1 * slopes.square().sum(1).mean()


ROADS: list[type[Automatic]] = [
    PlainBackward,
    ManualBackward,
    BackwardOfAutograd,
    AssignedGradients,
    AssignedClippedGradients,
    TwoBackwards,
    TwoKindsOfBackward,
    RetainedGraph,
    Halves,
    Accumulated,
    AccumulatedInAList,
    ByAnEngine,
    HooksOnGradients,
    ClosuresOfLBFGS,
    ClosuresWithManualBackward,
    ConstantLoss,
    PartsOfASequence,
    PenaltyInTheLoss,
    InnerStep,
    PenaltyOnGradients,
    PenaltyOnInputs,
    PenaltyOnInputsByTheTrainer,
]
