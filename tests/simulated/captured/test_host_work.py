"""A step whose Python code does something at each call is not replayed: it stays eager, with the reason.

What the compiler finds in any step that it traces, such as counters, lists, metrics and draws, is tested with compiled
steps.
"""

import datetime
import itertools
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from tests.simulated.captured.capturing import STAYS_EAGER, Result, assert_same, fit
from tests.support.step_networks import Network

# Read by steps, and changed by hooks.
FACTORS = {"one": 1.0}
STATE = SimpleNamespace(numbers=[1.0], calls=0)
ITERATOR: Any = None


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

    def noted(self) -> Any:
        """Return what it has noted."""
        return None


# Effects


class CountsElsewhere(Impure):
    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        STATE.calls += 1

    def noted(self) -> Any:
        return STATE.calls


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


class Iterates(Impure):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return next(self.numbers)


class HasNumberOnTheHost(Impure):
    """A tensor of the CPU, which a hook changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = [torch.ones((), dtype=torch.float64)]

    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return self.factor[0]

    def on_train_batch_end(self, *args: Any) -> None:
        self.factor[0] += 0.25


@torch.library.custom_op("captured_tests::noted_double", mutates_args=())
def noted_double(x: Tensor) -> Tensor:
    STATE.calls += 1
    return x * 2


@noted_double.register_fake
def fake_double(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class CallsPython(Impure):
    """An operation of the user's runs Python code."""

    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return noted_double(loss.detach())

    def noted(self) -> Any:
        return STATE.calls


@torch._dynamo.allow_in_graph
def scaled(x: Tensor) -> Tensor:
    return x * STATE.numbers[0]


class CallsInGraph(Impure):
    """A function of the user's that the compiler does not look into."""

    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return scaled(loss.detach())

    def on_train_batch_end(self, *args: Any) -> None:
        STATE.numbers[0] += 1.0


# Changes between steps


class ByHook(Impure):
    def on_train_batch_end(self, *args: Any) -> None:
        self.change(self.trainer.global_step)

    def change(self, step: int) -> None:
        raise NotImplementedError


class AttributeChanges(ByHook):
    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return self.scale

    def change(self, step: int) -> None:
        self.scale = 1.0 + step


class GlobalChanges(ByHook):
    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return FACTORS["one"]

    def change(self, step: int) -> None:
        FACTORS["one"] = 1.0 + step


class ListElsewhereChanges(ByHook):
    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return STATE.numbers[0]

    def change(self, step: int) -> None:
        STATE.numbers[0] = 1.0 + step


class LayerChanges(ByHook):
    """The rate of a dropout."""

    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return None

    def change(self, step: int) -> None:
        self.net[3].p = 0.2 + 0.02 * step


class ClosureChanges(ByHook):
    def __init__(self) -> None:
        super().__init__()
        cell = SimpleNamespace(value=1.0)
        self.cell = cell
        self.factor = lambda: cell.value

    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return self.factor()

    def change(self, step: int) -> None:
        self.cell.value = 1.0 + step


class EnvironmentChanges(ByHook):
    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return float(os.environ.get("CAPTURED_FACTOR", "1.5"))

    def change(self, step: int) -> None:
        os.environ["CAPTURED_FACTOR"] = str(1.0 + step)


class TensorIsReplaced(ByHook):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.factor = torch.ones((), dtype=torch.float64, device="cuda")

    def more(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        return self.factor

    def change(self, step: int) -> None:
        # The old ones are kept, so that each lies in other memory.
        self.kept.append(self.factor)
        self.factor = torch.full((), 1.0 + step, dtype=torch.float64, device="cuda")


# What can be said in one expression, with the reason.
SIMPLE: dict[str, tuple[Callable[[Any, Tensor, Any, int], Any], str]] = {
    "DrawsByNumpy": (lambda self, loss, batch, batch_idx: float(numpy.random.rand()), ""),
    "DrawsOnTheHost": (lambda self, loss, batch, batch_idx: torch.rand(()), "its operation \\w+ computes on cpu"),
    "DrawsAndCopies": (
        lambda self, loss, batch, batch_idx: torch.rand(1).to(loss.device).sum(),
        "its operation \\w+ computes on cpu",
    ),
    "ReadsTheClock": (lambda self, loss, batch, batch_idx: 1.0 if time.time() > 0 else 2.0, ""),
    "ReadsTheDate": (lambda self, loss, batch, batch_idx: 1.0 if datetime.datetime.now().year > 0 else 2.0, ""),
    "ReadsItem": (
        lambda self, loss, batch, batch_idx: 1 + loss.item(),
        r"it reads the value of a tensor \(`.item\(\)`\)",
    ),
    "Branches": (lambda self, loss, batch, batch_idx: 2.0 if loss > 1 else 3.0, "Data-dependent branching"),
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
    CountsElsewhere: "Unsupported method call",
    Hooks: "HOP: Unsafe side effect",
    HasGenerator: "",
    EnvironmentChanges: "does something else again and again",
    Iterates: "",
    HasNumberOnTheHost: "it computes with a tensor on cpu",
    CallsPython: r"it calls captured_tests(::|\.)noted_double",
    CallsInGraph: "it calls scaled",
    AttributeChanges: "does something else again and again, now because self.scale",
    GlobalChanges: "does something else again and again",
    ListElsewhereChanges: "does something else again and again",
    LayerChanges: "does something else again and again",
    ClosureChanges: "does something else again and again",
    TensorIsReplaced: "a tensor that it uses lies at another place in memory again and again",
}


def as_at_first() -> None:
    """Undo what steps have changed."""
    FACTORS["one"] = 1.0
    STATE.numbers[0] = 1.0
    os.environ.pop("CAPTURED_FACTOR", None)


def fit_noted(make: type[Impure], **options: Any) -> tuple[Result, Any]:
    """Train, and return what was noted, too."""
    as_at_first()
    STATE.calls = 0
    result = fit(make, **options)
    as_at_first()
    return result, result.module.noted()


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("make", REASONS, ids=lambda make: make.__name__)
def test_stays_eager(make: type[Impure]) -> None:
    eager, noted = fit_noted(make)
    with pytest.warns(UserWarning, match=f"{STAYS_EAGER} .*{REASONS[make]}") as warned:
        captured, noted_again = fit_noted(make, capture=True)
    assert len(warned) == 1, [str(warning.message) for warning in warned]
    assert_same(captured, eager)
    torch.testing.assert_close(noted_again, noted, rtol=0, atol=0)
