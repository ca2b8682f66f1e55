"""Captured steps compute what eager ones compute, to the bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging

from equipoise import OOMRecovery
from tests.simulated.captured import networks
from tests.simulated.captured.capturing import assert_same, fit
from tests.support.step_networks import SIZES, Averaging, Network, batches

pytestmark = pytest.mark.filterwarnings(
    "ignore:You seem to have configured",
    "ignore:Consider increasing",
    "ignore:The dirpath has",
    "ignore:Captured steps. the training step stays eager, because its steps run no backward",
)

# Two epochs of eight equal batches: two eager steps, a trial, and the first step of the second epoch.
REPLAYS = 13


@dataclass(frozen=True)
class Case:
    """A fit.

    Args:
        make: Makes the module.
        options: Further arguments of the Trainer. Callables make a value for each fit.
        sizes: The batches of an epoch.
        replays: Number of replays, at least.
    """

    make: Callable[[], Network] = Network
    options: dict[str, Any] = field(default_factory=dict)
    sizes: Sequence[int] = tuple(SIZES)
    replays: int = REPLAYS


CASES = {
    "plain": Case(),
    "a batch that is a dictionary": Case(networks.Dictionary),
    "attention in bf16-mixed": Case(networks.Attention, {"precision": "bf16-mixed"}),
    "tied embedding": Case(networks.Embedded),
    "frozen and unused parameters": Case(networks.Partial),
    "tensors changed in place": Case(Averaging),
    "a batch changed in place": Case(networks.InPlaceBatch),
    "a batch changed by its data": Case(networks.InPlaceData),
    "a pure hook on a tensor": Case(networks.HookedGradient),
    "hooks of the trainer": Case(networks.Hooked),
    "bf16-mixed, accumulation": Case(options={"precision": "bf16-mixed", "accumulate_grad_batches": 2}, replays=11),
    "windows that end with the epoch": Case(options={"accumulate_grad_batches": 3}, sizes=[5] * 10, replays=12),
    "clipping by value": Case(options={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "16-mixed, clipping": Case(options={"precision": "16-mixed", "gradient_clip_val": 0.1}),
    "bf16-true": Case(options={"precision": "bf16-true"}),
    "changing shapes": Case(sizes=[5, 4, 3] * 5, replays=12),
    "recovery is armed, accumulation": Case(
        options={"callbacks": lambda: [OOMRecovery()], "accumulate_grad_batches": 2}, replays=11
    ),
    "validation in between": Case(
        networks.Validated, {"val_check_interval": 3, "val_dataloaders": lambda: batches([4, 4])}
    ),
    "modes and attributes change": Case(networks.Switching, replays=12),
    "averaged weights": Case(options={"callbacks": lambda: [StochasticWeightAveraging(1e-2, 0.5)]}),
}


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_bit(name: str) -> None:
    case = CASES[name]
    eager = fit(case.make, case.sizes, **case.options)
    assert not eager.replays
    captured = fit(case.make, case.sizes, capture=True, **case.options)
    assert_same(captured, eager)
    assert captured.replays >= case.replays


@pytest.mark.parametrize("parts", [1, 2])
def test_resumed_in_the_midst_of_an_epoch(tmp_path: Path, parts: int) -> None:
    """Also in the midst of a window, whose gradients lie in static memory."""

    def saving(name: str) -> dict[str, Any]:
        saves = ModelCheckpoint(tmp_path / name, every_n_train_steps=3, save_top_k=-1)
        return {"callbacks": [saves], "enable_checkpointing": True, "accumulate_grad_batches": parts}

    eager = fit(Network, **saving("eager"))
    captured = fit(Network, capture=True, **saving("captured"))
    assert_same(captured, eager)
    path = next((tmp_path / "captured").glob("*step=3*.ckpt"))
    resumed = fit(Network, capture=True, ckpt_path=path, **saving("resumed"))
    assert resumed.replays
    for part in ("module", "optimizers", "metrics", "generators"):
        torch.testing.assert_close(resumed.state[part], eager.state[part], rtol=0, atol=0)
