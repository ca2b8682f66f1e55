"""Networks with what makes a cut into stages difficult, each on the ready batches of `tests.support.batches`."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.batches import CLASSES, FEATURES
from tests.support.networks.layers import WIDTH, Task, layers, network
from tests.support.networks.transparency import Base

__all__ = [
    "Transformer",
    "constants",
    "dropping",
    "frozen",
    "in_place",
    "late",
    "nested_tuples",
    "passed_twice",
    "shared_layer",
    "size_as_argument",
    "trained_before",
    "whole_blocks",
]


class Transformer(Base):
    """Torch's own layers, with padding; one call each in an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(FEATURES, 2, 12, dropout=0.0, batch_first=True)
        self.net = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(FEATURES), enable_nested_tensor=False)
        self.head = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch["features"], src_key_padding_mask=~batch["mask"])
        return nn.functional.cross_entropy(self.head(hidden.mean(1)), batch["label"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.net(batch["features"], src_key_padding_mask=~batch["mask"])
        # Torch's shortcut leaves other values where there is padding.
        self.log("val_loss", (hidden * batch["mask"].unsqueeze(-1)).square().sum())

    def configure_optimizers(self) -> Any:  # Adam would make something of the rounding in gradients that are 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


def nested_tuples() -> Task:
    """An LSTM's output is a tuple within a tuple."""

    def forward(self: Any, features: Tensor) -> Tensor:
        hidden, (last, cell) = self.first(features)
        more, _ = self.second(hidden)
        return self.head(more.mean(1)) + last[0, :, :CLASSES] * cell[0, :, :CLASSES]

    first, second = nn.LSTM(FEATURES, 5, batch_first=True), nn.LSTM(5, 4, num_layers=2, batch_first=True)
    return Task(network(forward, first=first, second=second, head=nn.Linear(4, CLASSES)))


def frozen() -> Task:
    """A whole stage is frozen, and a part that nothing before needs a gradient for."""
    module = layers(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    module.net[1].requires_grad_(False)
    module.net[3].requires_grad_(False)
    return module


def trained_before() -> Task:
    """Something that is trained is computed before the network, and used once more beside it."""

    def step(self: Any, batch: Any) -> Tensor:
        hidden = torch.tanh(self.first(batch["features"].mean(1)))
        loss = nn.functional.cross_entropy(self.head(self.net(hidden) + hidden), batch["label"])
        return loss + hidden.square().mean()

    module = Task(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 6)), step)
    module.first, module.head = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)
    return module


def shared_layer() -> Task:
    """The same layer is called in several stages."""

    def forward(self: Any, features: Tensor) -> Tensor:
        hidden = torch.tanh(self.one(features.flatten(1)))
        hidden = torch.tanh(self.other(hidden))
        hidden = torch.tanh(self.one(hidden)) + self.one.bias
        return self.head(torch.tanh(self.one(self.other(hidden))))

    one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return Task(network(forward, one=one, other=other, head=nn.Linear(WIDTH, CLASSES)))


def in_place() -> Task:
    """Layers that overwrite their input, also through a view of it."""

    def forward(self: Any, features: Tensor) -> Tensor:
        hidden = self.net(features)
        seen = self.net[1](features.flatten(1)).view(-1, 3, 3).flatten(1)
        seen.mul_(2)
        seen += 1
        return self.head(hidden + seen)

    inner = [nn.Linear(WIDTH, 9), nn.ReLU(inplace=True), nn.Linear(9, 9), nn.Identity(), nn.ELU(inplace=True)]
    return Task(network(forward, net=nn.Sequential(nn.Flatten(), *inner), head=nn.Linear(9, CLASSES)))


def whole_blocks() -> Task:
    """Blocks that ask for values stay whole, and change their input in place."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x += 1
        return 1.5 * torch.tanh(self.layer(x)) if float(x.detach().sum()) != 0 else x

    blocks = [network(forward, layer=nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    return layers(nn.Linear(WIDTH, WIDTH), *blocks)


def passed_twice() -> Task:
    """A stage hands on one tensor under two names, and another passes it by."""

    def forward(self: Any, features: Tensor) -> Tensor:
        hidden = self.one(features.flatten(1))
        same = self.same(hidden)
        return self.head(torch.tanh(self.other(hidden * 2 + same * 5)) + same)

    one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return Task(network(forward, one=one, same=nn.Identity(), other=other, head=nn.Linear(WIDTH, CLASSES)))


def size_as_argument() -> Task:
    """Micro-batches of unequal sizes are calls of unequal structure."""

    def forward(self: Any, features: Tensor, size: int) -> Tensor:
        return self.layers(features.reshape(size, WIDTH))

    def step(self: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["features"], len(batch["features"])), batch["label"])

    inner = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, CLASSES))
    return Task(network(forward, layers=inner), step)


def late() -> Task:
    """A layer creates its activation function when it is first called."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not hasattr(self, "activation"):
            self.activation = nn.Tanh()
        return self.activation(self.layer(x))

    return layers(network(forward, layer=nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def constants(device_of: Any) -> Task:
    """Its forward makes tensors that depend on nothing, on the device that a function says of its input."""

    def forward(self: Any, x: Tensor) -> Tensor:
        device = device_of(x)
        hidden = torch.tanh(self.one(x.flatten(1))) + torch.arange(9, device=device)
        return self.three(torch.tanh(self.two(hidden)) * torch.linspace(0, 1, 9, device=device).double())

    inner = {"one": nn.Linear(WIDTH, 9), "two": nn.Linear(9, 9), "three": nn.Linear(9, CLASSES)}
    return Task(network(forward, **inner))


def dropping() -> Task:
    return layers(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(4)))
