"""Attributes that a forward reads, also by its methods, base classes and properties."""

from functools import wraps
from typing import Any

from torch import Tensor, nn

from equipoise.extensions.pipeline.forward.attribute_reads import attributes_read


def decorated(function: Any) -> Any:
    @wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mode, self.steps, self.by_name, self.depth, self.layers = 1.0, "sum", 0, None, 2, [1]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Child(Base):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) if getattr(self, "by_name") is None else x  # noqa: B009
        return self.helper(x) * self.doubled * len(self.layers)

    def helper(self, x: Tensor) -> Tensor:
        return x.sum() if self.mode == "sum" else x

    @property
    def doubled(self) -> int:
        return 2 * self.depth

    def training_step(self, batch: Any) -> None:
        self.steps += 1


def test_attributes_that_a_forward_reads_are_found_with_their_values():
    assert attributes_read(Base()) == {"scale": 1.0}
    assert attributes_read(Child()) == {"scale": 1.0, "mode": "sum", "by_name": None, "depth": 2}
