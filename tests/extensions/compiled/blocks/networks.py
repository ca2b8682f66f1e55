"""Networks whose blocks are compiled."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.extensions.fsdp import modules
from tests.extensions.fsdp.programs import FEATURES, Net

__all__ = [
    "AOT",
    "NETWORKS",
    "Counting",
    "CountingBlock",
    "Frozen",
    "Lengths",
    "Pairs",
    "Plain",
    "Tied",
    "Whole",
]

# Torch's own forward and backward graphs, without kernels of the compiler, which take half a minute.
AOT = {"backend": "aot_eager"}


class Plain(Net):
    """A network whose weights are not sensitive to rounding."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Tied(Plain, modules.Tied):
    pass


class Frozen(Plain, modules.Frozen):
    """A frozen block is another kind."""


class Whole(Plain):
    """No repeated blocks, so the module's own forward is compiled."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.hidden = nn.Linear(7, 7)

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.hidden(torch.tanh(self.first(features))).relu())


class Pair(nn.Module):
    """Takes keyword arguments and a nested value, and returns a dictionary."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.Linear(7, width)
        self.right = nn.Linear(width, 7)

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: float, mask: Tensor | None = None) -> dict[str, Tensor]:
        left, right = pair
        hidden = self.right(torch.sin(self.left(left))) * scale
        return {"left": hidden + right, "right": left.cos() if mask is None else left * mask}


class Pairs(Plain):
    """Blocks of two widths."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair(5), Pair(5), Pair(6), Pair(6)])

    def forward(self, features: Tensor) -> Tensor:
        left = right = self.first(features)
        for number, block in enumerate(self.blocks):
            mask = (left > 0).to(left.dtype) if number % 2 else None
            pair = block((left, right), scale=0.5, mask=mask)
            left, right = pair["left"], pair["right"]
        return self.last(left + right)


class Lengths(Plain):
    """Sequences of a length that changes from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 7)
        self.length = FEATURES

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.length = 4 + batch_idx % 3

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features.unsqueeze(-1))[:, : self.length]
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden.mean(1))


NETWORKS = (Plain, Whole, Tied, Frozen, Pairs, Lengths)


class CountingBlock(nn.Module):
    """Counts the calls of its Python code, but not those that the compiler makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.calls: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.calls.append(1)
        return hidden + torch.tanh(self.inner(hidden))


class Counting(Plain):
    """Logs how often the Python code of its blocks has run in training."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CountingBlock() for _ in range(3))

    def on_train_start(self) -> None:
        for block in self.blocks:
            block.calls.clear()

    def on_validation_start(self) -> None:
        self.calls = sum(len(block.calls) for block in self.blocks)

    def on_validation_epoch_end(self) -> None:
        self.log("calls", float(self.calls), sync_dist=True, reduce_fx="sum")
        for block in self.blocks:
            block.calls.clear()
