"""A step whose Python code does something at each call is not replayed: it stays eager, with the reason.

What the compiler finds in any step that it traces, such as counters, lists, metrics and draws, is tested with compiled
steps.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from tests.simulated.captured.capturing import STAYS_EAGER, assert_same, fit
from tests.support.step_networks import Network

# Read by a step, and changed by its hook.
FACTORS = [1.0]


class Impure(Network):
    """Does one more thing in each step, with its result as a factor of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        factor = self.more(result["loss"], batch, batch_idx)
        if factor is not None:
            result["loss"] = result["loss"] * factor
        return result

    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        raise NotImplementedError


# Effects


class Hooks(Impure):
    """Notes gradients of a tensor in the midst."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        doubled = loss * 2
        doubled.register_hook(lambda gradient: self.norms.append(gradient.norm()))
        return doubled / loss.detach()


class HasGenerator(Impure):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator("cuda")

    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return torch.rand((), device=loss.device, generator=self.generator)


class HasNumberOnTheHost(Impure):
    """A tensor of the CPU, which a hook changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = [torch.ones((), dtype=torch.float64)]

    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return self.factor[0]

    def on_train_batch_end(self, *args: Any) -> None:
        self.factor[0] += 0.25


@torch._dynamo.allow_in_graph
def scaled(x: Tensor) -> Tensor:
    return x * FACTORS[0]


class CallsInGraph(Impure):
    """A function of the user's that the compiler does not look into."""

    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return scaled(loss.detach())

    def on_train_batch_end(self, *args: Any) -> None:
        FACTORS[0] += 1.0


# Changes between steps


class AttributeChanges(Impure):
    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return self.scale

    def on_train_batch_end(self, *args: Any) -> None:
        self.scale += 1.0


class TensorIsReplaced(Impure):
    """Keeps its old tensors, so that each lies in other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [torch.ones((), dtype=torch.float64, device="cuda")]

    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return self.factors[-1]

    def on_train_batch_end(self, *args: Any) -> None:
        self.factors.append(self.factors[-1] + 1.0)


# What can be said in one expression, with the reason.
SIMPLE: dict[str, tuple[Callable[[Any, Tensor, Any, int], Any], str]] = {
    "DrawsByNumpy": (lambda self, loss, batch, batch_idx: float(numpy.random.rand()), ""),
    "DrawsOnTheHost": (lambda self, loss, batch, batch_idx: torch.rand(()), "its operation \\w+ computes on cpu"),
    "ReadsTheClock": (lambda self, loss, batch, batch_idx: 1.0 if time.time() > 0 else 2.0, ""),
    "ReadsItem": (
        lambda self, loss, batch, batch_idx: 1 + loss.item(),
        r"it reads the value of a tensor \(`.item\(\)`\)",
    ),
    "Selects": (
        lambda self, loss, batch, batch_idx: batch[0][batch[0] > 0].mean(),
        "the host waits for the device",
    ),
    # The host waits inside an operation that gives nothing away.
    "Waits": (lambda self, loss, batch, batch_idx: torch.cuda.synchronize(), "it calls .*synchronize"),
    "UsesNumberOfBatch": (
        lambda self, loss, batch, batch_idx: 1.0 + batch_idx,
        "does something else again and again, now because batch_idx",
    ),
}

REASONS: dict[type[Impure], str] = {
    **{type(name, (Impure,), {"more": more}): reason for name, (more, reason) in SIMPLE.items()},
    Hooks: "HOP: Unsafe side effect",
    HasGenerator: "",
    HasNumberOnTheHost: "it computes with a tensor on cpu",
    CallsInGraph: "it calls scaled",
    AttributeChanges: "does something else again and again, now because self.scale",
    TensorIsReplaced: "a tensor that it uses lies at another place in memory again and again",
}


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("make", REASONS, ids=lambda make: make.__name__)
def test_a_step_with_work_of_the_host_stays_eager_with_the_reason(make: type[Impure]) -> None:
    FACTORS[:] = [1.0]
    eager = fit(make)
    FACTORS[:] = [1.0]
    with pytest.warns(UserWarning, match=f"{STAYS_EAGER} .*{REASONS[make]}") as warned:
        captured = fit(make, capture=True)
    assert len(warned) == 1, [str(warning.message) for warning in warned]
    assert_same(captured, eager)
