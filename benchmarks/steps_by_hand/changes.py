"""Programs that change gradients or weights in a step, and programs with two networks."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.steps_by_hand.networks import Automatic, ByHand, Critic, Network

__all__ = ["CHANGES"]


class ClippedByTorch(ByHand):
    """`torch.nn.utils.clip_grad_norm_` between backward and step."""

    def change_gradients(self, parameters: list[nn.Parameter]) -> None:
        nn.utils.clip_grad_norm_(parameters, 0.3)


class ValuesClippedByTorch(ByHand):
    """`torch.nn.utils.clip_grad_value_` between backward and step."""

    def change_gradients(self, parameters: list[nn.Parameter]) -> None:
        nn.utils.clip_grad_value_(parameters, 0.1)


class Signs(ByHand):
    """The sign of each gradient in its place."""

    def change_gradients(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad.sign_()


class Noise(ByHand):
    """Noise on the gradients, by a generator with the same seed everywhere."""

    def change_gradients(self, parameters: list[nn.Parameter]) -> None:
        draw = torch.Generator().manual_seed(self.global_step)
        for parameter in parameters:
            parameter.grad.add_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64), alpha=0.1)


class Centred(ByHand):
    """The mean of each row is taken off the gradients of matrices."""

    def change_gradients(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad.dim() > 1:
                parameter.grad = parameter.grad - parameter.grad.mean(1, keepdim=True)


class NormInTheLog(ByHand):
    """The norm of the gradients is logged after the backward."""

    def change_gradients(self, parameters: list[nn.Parameter]) -> None:
        norms = torch.stack([parameter.grad.norm() for parameter in parameters])
        self.note("gradient_norm", norms.norm(), 1)


class SharpnessAware(ByHand):
    """Sharpness-aware minimisation: gradients at weights that are moved along the gradient."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        parameters = list(self.network.parameters())
        self.loss(batch).backward()
        with torch.no_grad():
            norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
            moves = [0.05 * parameter.grad / norm for parameter in parameters]
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.add_(move)
        self.optimizers().zero_grad()
        self.loss(batch).backward()
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.sub_(move)


class SharpnessAwareManualBackward(SharpnessAware):
    """Sharpness-aware minimisation with `manual_backward`."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        parameters = list(self.network.parameters())
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
            before = [parameter.clone() for parameter in parameters]
            for parameter in parameters:
                parameter.add_(0.05 * parameter.grad / norm)
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)


class Surgery(ByHand):
    """Gradient surgery: of two losses' gradients one is projected where they conflict."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        parameters = list(self.network.parameters())
        second = self.network(batch[0]).mean()
        pairs = zip(
            parameters,
            torch.autograd.grad(self.loss(batch), parameters),
            torch.autograd.grad(second, parameters),
            strict=True,
        )
        for parameter, one, other in pairs:
            conflict = (one * other).sum().clamp(max=0)
            parameter.grad = one - conflict / other.square().sum() * other + other


class ClampedWeights(Automatic):
    """Weights are clamped in `training_step`, with the trainer's own optimisation."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.clamp_(-0.4, 0.4)
        return self.loss(batch)


class ClampedAfterTheStep(ByHand):
    """Weights are clamped after the step of the optimiser."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        for parameter in self.network.parameters():
            parameter.data.clamp_(-0.4, 0.4)


class UnitNorm(ByHand):
    """Rows of the first layer are brought to length one after the step."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        with torch.no_grad():
            weight = self.network.first.weight
            weight.copy_(weight / weight.norm(dim=1, keepdim=True))


class NoiseOnWeights(Automatic):
    """Noise on the weights before the forward, by a generator with the same seed everywhere."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        draw = torch.Generator().manual_seed(self.global_step)
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64), alpha=0.01)
        return self.loss(batch)


class FormerGradients(Automatic):
    """Gradients of a window's earlier batch are halved in `training_step`."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        if batch_idx % 2 == 1:
            for parameter in self.network.parameters():
                parameter.grad.mul_(0.5)
        return self.loss(batch)


class Teacher(Automatic):
    """A frozen teacher follows the student by a moving average in `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.network).requires_grad_(requires_grad=False)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.network.parameters(), strict=True):
                slow.lerp_(fast, 0.3)
            wanted = self.teacher(batch[0])
        return self.loss(batch) + (self.network(batch[0]) - wanted).square().mean()


class TeacherByHand(Teacher):
    """A frozen teacher follows the student after the step of the optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        loss = self.loss(batch) + (self.network(batch[0]) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.network.parameters(), strict=True):
                slow.lerp_(fast, 0.3)


class CopiedTarget(TeacherByHand):
    """Q-learning: a target network is replaced by `load_state_dict` after each second step."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        with torch.no_grad():
            wanted = batch[1] + 0.5 * self.teacher(batch[0])
        loss = (self.network(batch[0]) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if batch_idx % 2 == 1:
            self.teacher.load_state_dict(self.network.state_dict())


class ReplayedSamples(ByHand):
    """Reinforcement learning: each step trains on all samples that the program has kept so far."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Sequence[Tensor]] = []

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        self.kept.append(batch)
        features, targets = (torch.cat(tensors) for tensors in zip(*self.kept, strict=True))
        self.loss([features, targets]).backward()


class Lookahead(ByHand):
    """Slow weights, kept as a list of tensors, meet the fast ones after each third step."""

    def on_train_start(self) -> None:
        self.slow = [parameter.detach().clone() for parameter in self.network.parameters()]

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if batch_idx % 3 == 2:
            with torch.no_grad():
                for slow, parameter in zip(self.slow, self.network.parameters(), strict=True):
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)


class FrozenInTurn(ByHand):
    """The blocks and the other layers are frozen in turn by `requires_grad_`."""

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        step = self.global_step
        self.network.blocks.requires_grad_(step % 2 == 0)
        self.network.last.requires_grad_(step % 2 == 1)
        self.loss(batch).backward()

    def change_gradients(self, parameters: list[nn.Parameter]) -> None:
        nn.utils.clip_grad_norm_([one for one in parameters if one.grad is not None], 0.5)


class SchedulesByHand(ByHand):
    """A schedule that the program steps by hand, and a rate that it sets."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()
        if batch_idx == 3:
            self.optimizers().param_groups[0]["momentum"] = 0.5

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class Adversaries(ByHand):
    """A generator and a critic, with plain backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network(outputs=5)
        self.critic = Critic()
        self.critic.first = nn.Linear(5, 6)
        draw = torch.Generator().manual_seed(9)
        for parameter in self.critic.first.parameters():
            nn.init.normal_(parameter, std=0.5, generator=draw)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        made = self.network(batch[0])
        real = torch.cat(list(batch), dim=1)
        for index, optimizer in enumerate(self.optimizers()):
            self.begin(optimizer)
            loss = -self.critic(made).mean() if index else self.loss_of_critic(real, made.detach())
            self.note(f"loss_{index}", loss, len(real))
            optimizer.zero_grad()
            self.run_backward(loss)
            optimizer.step()
            self.end(optimizer)

    def loss_of_critic(self, real: Tensor, made: Tensor) -> Tensor:
        """Return the loss of the critic."""
        return nn.functional.softplus(self.critic(made)).mean() + nn.functional.softplus(-self.critic(real)).mean()

    def begin(self, optimizer: Any) -> None:
        """Do nothing before the turn of an optimiser."""

    def end(self, optimizer: Any) -> None:
        """Do nothing after the turn of an optimiser."""

    def run_backward(self, loss: Tensor) -> None:
        """Run a plain backward."""
        loss.backward()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.05, 0.5) for part in (self.critic, self.network)]


class AdversariesInTurn(Adversaries):
    """A generator and a critic, with `toggle_optimizer` and `manual_backward`."""

    def begin(self, optimizer: Any) -> None:
        self.toggle_optimizer(optimizer)

    def end(self, optimizer: Any) -> None:
        self.untoggle_optimizer(optimizer)

    def run_backward(self, loss: Tensor) -> None:
        self.manual_backward(loss)


class ClampedCritic(Adversaries):
    """A Wasserstein GAN, whose critic is clamped after its step."""

    def loss_of_critic(self, real: Tensor, made: Tensor) -> Tensor:
        return self.critic(made).mean() - self.critic(real).mean()

    def end(self, optimizer: Any) -> None:
        for parameter in self.critic.parameters():
            parameter.data.clamp_(-0.3, 0.3)


class PenalisedCritic(Adversaries):
    """A Wasserstein GAN with a penalty on the critic's gradients between real and made samples."""

    def loss_of_critic(self, real: Tensor, made: Tensor) -> Tensor:
        between = (0.3 * real + 0.7 * made).requires_grad_()
        (slopes,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slopes.norm(dim=1) - 1).square().mean()
        return self.critic(made).mean() - self.critic(real).mean() + penalty


CHANGES: list[type[Automatic]] = [
    ClippedByTorch,
    ValuesClippedByTorch,
    Signs,
    Noise,
    Centred,
    NormInTheLog,
    SharpnessAware,
    SharpnessAwareManualBackward,
    Surgery,
    ClampedWeights,
    ClampedAfterTheStep,
    UnitNorm,
    NoiseOnWeights,
    FormerGradients,
    Teacher,
    TeacherByHand,
    CopiedTarget,
    ReplayedSamples,
    Lookahead,
    FrozenInTurn,
    SchedulesByHand,
    Adversaries,
    AdversariesInTurn,
    ClampedCritic,
    PenalisedCritic,
]
