"""Training in shards equals training on one device, in float64, with every option, on 2, 3 and 4 processes.

EQUIPOISE_TEST_ALL=1 tests every case on every number of processes, which takes two minutes.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.extensions.fsdp.modules import Attention, ByHand, Frozen, Marked, ReadsElsewhere, Tied, Unused, Weighted
from tests.extensions.fsdp.programs import FEATURES, Net, assert_close, assert_same_cases, fsdp, outcome
from tests.support.all_cases import dealt

# Modules


class Thawed(Net):
    """A block that is trained from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks[1].requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Recurrent(Net):
    """A layer that keeps a second list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, FEATURES, batch_first=True)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(self.lstm(features.unsqueeze(1))[0][:, 0])


class Toggling(ByHand):
    """Trains two parts in turn, with an optimiser for each, and switches `requires_grad` of the other."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            with self.toggled_optimizer(optimizer):
                self.manual_backward(self.loss(batch) + self.last.weight.square().sum())
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        blocks = torch.optim.AdamW(self.blocks.parameters(), lr=0.01)
        return blocks, torch.optim.SGD([*self.first.parameters(), *self.last.parameters()], lr=0.1)


class SwitchedOnce(Net):
    """Its step freezes a layer of the root, and thaws it in a later epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.first.requires_grad_(self.current_epoch == 1)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("trained", float(self.first.weight.requires_grad), on_step=False, on_epoch=True)


class WithoutIndex(Net):
    """Its steps take the batch alone."""

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)

    def validation_step(self, batch: Any) -> None:  # type: ignore[override]
        super().validation_step(batch, 0)


class HooksOnShards(Net):
    """Reads weights and gradients outside of the steps, where they are in shards, and changes them in place."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([parameter.grad.norm() for parameter in self.parameters()]).norm()
        self.log("gradient", norm, on_step=False, on_epoch=True)
        if norm > 0.1:
            for parameter in self.parameters():
                parameter.grad.mul_(0.1 / norm)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)
            self.first.weight *= 100
            self.first.weight //= 2
            self.first.weight %= 3

    def on_train_epoch_end(self) -> None:
        self.log("weight", self.last.weight.norm())


# Runs

# The module, and the options of the trainer. The ends are ragged unless a count says otherwise.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (Net, {"again": True}),
    "clipped": (Net, {"gradient_clip_val": 0.05}),
    "clipped by value": (Net, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulated and clipped": (Net, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
    "fewer samples than processes": (Net, {"count": 1}),
    "tied weights": (Tied, {"again": True}),
    "frozen parts": (Frozen, {}),
    "thawed parts": (Thawed, {}),
    "an unused layer": (Unused, {}),
    "attention": (Attention, {}),
    "recurrent": (Recurrent, {}),
    "marked parameters": (Marked, {"again": True}),
    "steps without an index": (WithoutIndex, {}),
    "weighted": (Weighted, {"accumulate_grad_batches": 2}),
    "activation checkpointing": (Net, {"activation_checkpointing": ["blocks.*"]}),
    "activation checkpointing around units": (Attention, {"activation_checkpointing": ["encoder"]}),
    "toggled optimisers": (Toggling, {"count": 48}),
    "a switch in a step": (SwitchedOnce, {"count": 48}),
    "a weight that is read outside of its unit": (ReadsElsewhere, {}),
    "a fused optimiser": (Net, {"fused_optimizer": True}),
    "validations between steps": (Net, {"val_check_interval": 2}),
    "manual optimisation": (ByHand, {"count": 48, "again": True}),
}
# Those that run in every change.
OFTEN = [
    "plain",
    "accumulated and clipped",
    "tied weights",
    "frozen parts",
    "attention",
    "marked parameters",
    "steps without an index",
    "manual optimisation",
    "toggled optimisers",
    "a switch in a step",
]
# Options of the strategy.
STRATEGIES: dict[str, dict[str, Any]] = {
    "units by name": {"units": ["blocks.*.up", "blocks.1", "first"]},
    "units that stay whole": {"reshard_after_forward": False},
    "one unit": {"units": []},
    "calls compared at the end": {"compare_calls": False},
}


@cache
def on_one_device(case: str) -> dict[str, Any]:
    kind, options = CASES[case if case in CASES else "plain"]
    return outcome(kind, **options)


def under_fsdp(case: str, processes: int, replicas: int) -> dict[str, Any]:
    kind, options = CASES[case if case in CASES else "plain"]
    return outcome(kind, fsdp(replicas=replicas, **STRATEGIES.get(case, {})), processes, **options)


EVERYTHING = [*CASES, *STRATEGIES]
# Processes and replicas, over which all cases are dealt out in turn beside two processes.
LAYOUTS = {"2 replicas of 2": (4, 2), "3 processes": (3, 1), "4 processes": (4, 1)}


def covering() -> list[Any]:
    """Each case on two processes and on one of the larger layouts; with EQUIPOISE_TEST_ALL=1, each on all of them."""
    rarely = [name for name in EVERYTHING if name not in OFTEN]
    listed = [
        pytest.param(2, 1, OFTEN, id="2 processes, often"),
        pytest.param(2, 1, rarely, marks=pytest.mark.slow, id="2 processes, rarely"),
    ]
    for number, (name, (processes, replicas)) in enumerate(LAYOUTS.items()):
        names = dealt(EVERYTHING, number, len(LAYOUTS))
        listed.append(pytest.param(processes, replicas, names, marks=pytest.mark.slow, id=name))
    return listed


@pytest.mark.thorough
@pytest.mark.parametrize(("processes", "replicas", "names"), covering())
def test_training_in_shards_equals_that_of_one_device(processes: int, replicas: int, names: list[str]) -> None:
    assert_same_cases(processes, names, on_one_device, partial(under_fsdp, processes=processes, replicas=replicas))


@pytest.mark.thorough
@pytest.mark.parametrize(("processes", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_hooks_read_norms_of_weights_and_gradients_and_change_them_in_place(processes: int, replicas: int) -> None:
    actual = outcome(HooksOnShards, fsdp(replicas=replicas), processes, count=48)
    assert_close(outcome(HooksOnShards, count=48), actual)


def test_one_process_trains_as_one_device() -> None:
    assert_close(on_one_device("plain"), under_fsdp("plain", processes=1, replicas=1))
