"""Programs that optimise by hand, each with another way to its gradients. On one device they say what is right."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

__all__ = ["PROGRAMS", "ByHand", "program"]

PROGRAMS: dict[str, type["ByHand"]] = {}


class ByHand(L.LightningModule):
    """A small network whose step a program defines."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        self.other = nn.Linear(4, 1).double()

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.gradients(batch, batch_idx)
        optimizer.step()

    def gradients(self, batch: Any, batch_idx: int) -> None:
        """Compute the gradients of a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.net.parameters())


def program(make: type[ByHand]) -> type[ByHand]:
    PROGRAMS[make.__name__] = make
    return make


def step_of(**programs: Callable[[ByHand, Any, int], None]) -> None:
    """Make programs of functions that compute the gradients of a step."""
    for name, function in programs.items():
        program(type(name, (ByHand,), {"gradients": function}))


def assign(parameters: list[nn.Parameter], gradients: Any) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def two_backwards(self: ByHand, batch: Any, batch_idx: int) -> None:
    loss = self.loss(batch)
    loss.backward(retain_graph=True)
    (loss.square() / loss.detach()).backward()
    self.net[0].weight.square().sum().backward()


def clipped_by_torch(self: ByHand, batch: Any, batch_idx: int) -> None:
    torch.autograd.backward([self.loss(batch)])
    nn.utils.clip_grad_norm_(self.parameters(), 0.05)


def penalty(self: ByHand, batch: Any, batch_idx: int) -> None:
    """The penalty of a norm, which is not linear in the samples."""
    loss = self.loss(batch)
    gradients = grad(loss, self.weights, create_graph=True)
    (loss + 0.3 * sum(gradient.square().sum() for gradient in gradients).sqrt()).backward()


def with_graph(self: ByHand, batch: Any, batch_idx: int) -> None:
    """A product with the Hessian, as AdaHessian takes it."""
    self.loss(batch).backward(create_graph=True)
    gradients = [parameter.grad for parameter in self.weights]
    vectors = [torch.full_like(gradient, 0.1) for gradient in gradients]
    products = grad(gradients, self.weights, grad_outputs=vectors)
    assign(self.weights, [(gradient * product).detach() for gradient, product in zip(gradients, products, strict=True)])


def one_inner_step(self: ByHand, batch: Any, batch_idx: int) -> None:
    """The step looks ahead by two steps with graphs, and each time at all samples."""

    def errors() -> Tensor:
        return torch.func.functional_call(self.net, weights, (batch[0],)) - batch[1]

    weights: dict[str, Tensor] = dict(self.net.named_parameters())
    for _ in range(2):
        inner = grad(errors().square().mean(), list(weights.values()), create_graph=True)
        weights = {name: weight - 0.3 * g for (name, weight), g in zip(weights.items(), inner, strict=True)}
    errors().abs().mean().backward()


def surgery(self: ByHand, batch: Any, batch_idx: int) -> None:
    """Two tasks, of whose gradients one is projected."""
    first, second = (self.net(batch[0]) - batch[1]).unbind(1)
    one = grad(first.square().mean(), self.weights, retain_graph=True)
    two = grad(second.sin().mean(), self.weights)
    product = sum((a * b).sum() for a, b in zip(one, two, strict=True))
    size = sum(b.square().sum() for b in two)
    assign(self.weights, [a - product.clamp(max=0) / size * b + b for a, b in zip(one, two, strict=True)])


def unused(self: ByHand, batch: Any, batch_idx: int) -> None:
    parameters = list(self.parameters())
    assign(parameters, grad(self.loss(batch), parameters, allow_unused=True))


def sharpness(self: ByHand, batch: Any, batch_idx: int) -> None:
    """Gradients where the loss is larger; those of before are kept without a copy."""
    self.loss(batch).backward()
    before = [parameter.grad for parameter in self.weights]
    with torch.no_grad():
        torch._foreach_add_(self.weights, before, alpha=0.1)
    self.zero_grad()
    self.loss(batch).backward()
    with torch.no_grad():
        torch._foreach_sub_(self.weights, before, alpha=0.1)
    for parameter, gradient in zip(self.weights, before, strict=True):
        parameter.grad = parameter.grad + 0.5 * gradient


def penalised_inputs(self: ByHand, batch: Any, batch_idx: int) -> None:
    """A gradient for each sample is that of its process."""
    x = batch[0].clone().requires_grad_()
    slopes = grad(self.net(x).sum(), x, create_graph=True)[0]
    (self.loss(batch) + (slopes.norm(dim=1) - 1).square().mean()).backward()


def clipped_samples(self: ByHand, batch: Any, batch_idx: int) -> None:
    """The gradient of each sample is clipped before all are added."""

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (torch.func.functional_call(self.net, weights, (x,)) - y).square().mean()

    weights = dict(self.net.named_parameters())
    of_samples = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, batch[0], batch[1]).values()
    clipped = [each.clamp(-0.1, 0.1).sum(0) for each in of_samples]
    *totals, count = (
        self.all_gather(each).reshape(-1, *each.shape).sum(0) for each in (*clipped, torch.tensor(float(len(batch[0]))))
    )
    assign(self.weights, [total / count for total in totals])


def checkpointed(self: ByHand, batch: Any, batch_idx: int) -> None:
    made = checkpoint(self.net, batch[0].requires_grad_(), use_reentrant=True)
    (made - batch[1]).square().mean().backward()


def inputs_alone(self: ByHand, batch: Any, batch_idx: int) -> None:
    self.loss(batch).backward(inputs=self.weights[:2])


step_of(
    plain=lambda self, batch, batch_idx: self.loss(batch).backward(),
    manual=lambda self, batch, batch_idx: self.manual_backward(self.loss(batch)),
    function=lambda self, batch, batch_idx: torch.autograd.backward(self.loss(batch)),
    assigned=lambda self, batch, batch_idx: assign(self.weights, grad(self.loss(batch), self.weights)),
    two_backwards=two_backwards,
    clipped_by_torch=clipped_by_torch,
    penalty=penalty,
    with_graph=with_graph,
    weights_of_inner_steps_as_in_maml=one_inner_step,
    surgery=surgery,
    unused=unused,
    sharpness=sharpness,
    penalised_inputs=penalised_inputs,
    clipped_samples=clipped_samples,
    checkpointed=checkpointed,
    inputs_alone=inputs_alone,
)


@program
class Accumulated(ByHand):
    """One step for two batches."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (self.loss(batch) / 2).backward()
        if batch_idx % 2:
            self.optimizers().step()
            self.zero_grad(set_to_none=False)


@program
class Limited(ByHand):
    """LBFGS, which calls its closure until the loss pleases it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.net.parameters(), max_iter=2, line_search_fn="strong_wolfe")


@program
class Adversaries(ByHand):
    """Two optimisers in turn, of which each freezes the parameters of the other."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            losses = (self.net(batch[0]).sum(1) - self.other(batch[0])[:, 0]).square()
            (losses if index else -losses.tanh()).mean().backward()
            # The second one in the way of plain torch.
            (optimizer.optimizer if index else optimizer).step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.Adam(self.other.parameters(), 0.01)


@program
class AfterTheStep(ByHand):
    """The step of the optimiser follows `training_step`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


@program
class Thawed(ByHand):
    """Parameters that are frozen until the second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx > 0 or self.current_epoch > 0)
        super().training_step(batch, batch_idx)

    def gradients(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()


@program
class Unconnected(ByHand):
    """A loss that only some samples have; the process of rank 0 has none of them in the first batches."""

    how = "constant"

    def gradients(self, batch: Any, batch_idx: int) -> None:
        chosen = batch[2] % 2 == 1 if batch_idx < 2 else batch[2] >= 0
        if chosen.any():
            losses = (self.net(batch[0]) - batch[1]).square().mean(1)
            (losses * chosen).mean().backward()
        elif self.how == "constant":
            torch.zeros((), requires_grad=True).backward()


program(type("Missing", (Unconnected,), {"how": "none"}))
