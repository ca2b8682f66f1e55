"""The networks of the programs, and what the programs have in common."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import LightningModule

__all__ = ["FEATURES", "Automatic", "ByHand", "Critic", "Network"]

FEATURES = 4


class Block(nn.Module):
    """A layer beside which its input passes, as in a residual network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """Return the features and what the layer adds, of shape (samples, width)."""
        return features + torch.tanh(self.layer(features))


class Network(nn.Module):
    """A perceptron with two blocks, which `fsdp` chooses as units, and layers outside of them.

    Args:
        inputs: The number of features. Default: 4.
        outputs: The number of outputs. Default: 1.
        seed: The seed of the weights. Default: 5.
    """

    def __init__(self, inputs: int = FEATURES, outputs: int = 1, seed: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 6)
        self.blocks = nn.ModuleList([Block(6), Block(6)])
        self.last = nn.Linear(6, outputs)
        draw = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=draw)

    def forward(self, features: Tensor) -> Tensor:
        """Return the outputs, of shape (samples, outputs)."""
        features = torch.tanh(self.first(features))
        for block in self.blocks:
            features = block(features)
        return self.last(features)


class Critic(Network):
    """A network with weights of its own, for programs with two of them."""

    def __init__(self) -> None:
        super().__init__(seed=6)


class Automatic(LightningModule):
    """Trains a network with the trainer's own optimisation; programs change a part of it."""

    rate = 0.02

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        """Return the mean of the squared errors, and log it."""
        features, targets = batch
        loss = (self.network(features) - targets).square().mean()
        self.note("loss", loss, len(features))
        return loss

    def note(self, name: str, value: Any, samples: int) -> None:
        """Log the mean of a value over an epoch."""
        if isinstance(value, Tensor):
            value = value.detach()
        self.log(name, value, on_step=False, on_epoch=True, sync_dist=True, batch_size=samples)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor | None:
        """Return the loss."""
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        """Return stochastic gradient descent with momentum on the network."""
        return torch.optim.SGD(self.network.parameters(), self.rate, momentum=0.5)


class ByHand(Automatic):
    """Trains a network by hand: `step` computes the gradients, and steps the optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """Compute gradients and step the optimiser."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.compute_gradients(batch)
        self.change_gradients(list(self.network.parameters()))
        optimizer.step()

    def compute_gradients(self, batch: Sequence[Tensor]) -> None:
        """Run a plain backward."""
        self.loss(batch).backward()

    def change_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Leave the gradients as they are."""
