"""Networks that several of these tests train in shards: each has what shards may get wrong."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from tests.extensions.fsdp.programs import FEATURES, Net

__all__ = [
    "Attention",
    "ByHand",
    "Frozen",
    "Marked",
    "Matrices",
    "Overflows",
    "ReadsElsewhere",
    "Tied",
    "Unused",
    "Weighted",
]


class Tied(Net):
    """Two blocks share a weight, and the last layer shares one with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[1].up.weight
        self.back = nn.Linear(7, FEATURES, bias=False)
        self.back.weight = nn.Parameter(self.first.weight.detach().clone().T.contiguous())
        self.again = nn.Linear(FEATURES, 7, bias=False)
        self.again.weight = self.first.weight

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features + self.back(self.again(features)))


class Frozen(Net):
    """A frozen block, and a layer of which one weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.first.weight.requires_grad_(False)


class ReadsElsewhere(Net):
    """Reads the weight of a block outside of its forward."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.penalty(batch[0])

    def penalty(self, features: Tensor) -> Tensor:
        return nn.functional.linear(self.first(features), self.blocks[1].up.weight).mean()


class Unused(Net):
    """A layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


class Attention(Net):
    """Torch's own blocks, which read some of their weights without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(self.encoder(self.embedding(features.unsqueeze(-1)))[:, 0])

    def configure_optimizers(self) -> Any:
        # The gradient of a bias of the keys is zero but for rounding, and Adam would make a step of that.
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Net):
    """Optimises by hand, and steps every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class Weighted(Net):
    """The mean over marked samples, whose number is the weight; some batches have none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        marked = batch[1][:, 0] > 0.8
        losses = (self(batch[0]) - batch[1])[:, 0] ** 2
        weight = marked.sum()
        return {"loss": (losses * marked).sum() / weight.clamp(min=1), "loss_weight": int(weight)}


class Marked(Net):
    """Its optimiser groups parameters by an attribute that they have."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.blocks.parameters():
            parameter.no_decay = True  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        marked = [parameter for parameter in self.parameters() if hasattr(parameter, "no_decay")]
        others = [parameter for parameter in self.parameters() if not hasattr(parameter, "no_decay")]
        groups = [{"params": marked, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.5}]
        return torch.optim.AdamW(groups, lr=0.01)


class Overflows(Net):
    """The gradient of a part of one weight overflows in float16, in one step: one process has that part."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            loss = loss + self.last.bias.sum() * 0 + self.first.weight[0, 0] * 1e38
        return loss


class Matrices(Net):
    """The matrices are stepped by Muon, and all else by AdamW; no step uses one of the matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3, bias=False)

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self.parameters() if parameter.dim() != 2]
        return Muon(matrices, lr=0.02), AdamW(others, lr=0.01)
