"""Facts about the models of the campaign."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Generator, nn

__all__ = ["Model"]


@dataclass(frozen=True)
class Model:
    """A model of a library.

    Attributes:
        name: Its name in the table.
        library: The library that it needs.
        make: Builds it from its configuration.
        batch: Draws a batch of so many samples. Its entries are the keyword arguments of the model.
        sizes: The samples of each batch. The last of them cannot be halved evenly.
        constants: Further arguments, which belong to all samples.
        loss: "outputs" for a base model; of a task model, which computes its loss, what that is the mean of: "samples",
            "labels", or "next labels" for a causal language model.
        graphs: Whether a batch is a batch of graphs of torch_geometric, of which a method of the module takes parts.
        first_step: The length of the first step, as a share of the norm of the weights, since gradients of these models
            differ by magnitudes.
        refusal: What the message says of a model that is rightly refused; empty if it must be cut.
    """

    name: str
    library: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, Generator], Any]
    sizes: tuple[int, ...] = (4, 4, 3)
    constants: Mapping[str, Any] = field(default_factory=dict)
    loss: str = "outputs"
    graphs: bool = False
    first_step: float = 1e-3
    refusal: str = ""
