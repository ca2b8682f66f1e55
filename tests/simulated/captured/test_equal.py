"""Captured steps compute what eager ones compute, to the bit: at least 20 configurations."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging

from equipoise import OOMRecovery
from tests.simulated.captured import networks
from tests.simulated.captured.capturing import assert_same, fit
from tests.support.pipelines import quiet
from tests.support.step_networks import SIZES, Network, batches

pytestmark = pytest.mark.filterwarnings(
    "ignore:You seem to have configured",
    "ignore:Consider increasing",
    "ignore:The dirpath has",
    "ignore:Captured steps. the training step stays eager, because its steps run no backward",
)

FEWEST = 20
# Two epochs of eight equal batches: two eager steps, a trial, and the first step of the second epoch.
REPLAYS = 13


def adam(**options: Any) -> Callable[[], Network]:
    """Return a constructor of a network whose optimiser is AdamW."""

    class WithAdam(Network):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.01, **options)

    return WithAdam


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


def recovering() -> list[Any]:
    return [OOMRecovery()]


CASES = {
    "plain": Case(),
    "only a loss": Case(networks.OnlyLoss),
    "a batch that is a dictionary": Case(networks.Dictionary),
    "convolution": Case(networks.Convolution),
    "attention": Case(networks.Attention),
    "tied embedding": Case(networks.Embedded),
    "several losses": Case(networks.Several),
    "frozen and unused parameters": Case(networks.Partial),
    "tensors changed in place": Case(networks.Averaging),
    "a batch changed in place": Case(networks.InPlaceBatch),
    "a batch changed by its data": Case(networks.InPlaceData),
    "a pure hook on a tensor": Case(networks.HookedGradient),
    "a pure hook on a module": Case(networks.HookedModule),
    "hooks of the trainer": Case(networks.Hooked),
    "scheduler": Case(networks.Scheduled),
    "AdamW": Case(adam()),
    "AdamW, capturable": Case(adam(capturable=True)),
    "AdamW, fused": Case(adam(fused=True)),
    "accumulation of 2": Case(options={"accumulate_grad_batches": 2}, replays=11),
    "accumulation of 4, clipping": Case(
        options={"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}, sizes=[5] * 12, replays=14
    ),
    "clipping by norm": Case(options={"gradient_clip_val": 0.05}),
    "clipping by value": Case(options={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "32-true": Case(options={"precision": "32-true"}),
    "bf16-mixed": Case(options={"precision": "bf16-mixed"}),
    "bf16-mixed, accumulation": Case(options={"precision": "bf16-mixed", "accumulate_grad_batches": 2}, replays=11),
    "16-mixed": Case(options={"precision": "16-mixed"}),
    "16-mixed, clipping": Case(options={"precision": "16-mixed", "gradient_clip_val": 0.1}),
    "bf16-true": Case(options={"precision": "bf16-true"}),
    "attention in bf16-mixed": Case(networks.Attention, {"precision": "bf16-mixed"}),
    "changing shapes": Case(sizes=[5, 4, 3] * 5, replays=12),
    "recovery is armed": Case(options={"callbacks": recovering}),
    "recovery is armed, accumulation": Case(
        options={"callbacks": recovering, "accumulate_grad_batches": 2}, replays=11
    ),
    "validation in between": Case(
        networks.Validated, {"val_check_interval": 3, "val_dataloaders": lambda: batches([4, 4])}
    ),
    "a layer is frozen": Case(networks.Freezing, replays=10),
    "modes and attributes change": Case(networks.Switching, replays=12),
    "averaged weights": Case(options={"callbacks": lambda: [StochasticWeightAveraging(1e-2, 0.5)]}),
    "no prefetch": Case(options={"prefetch": False}),
    "deterministic": Case(options={"deterministic": True}),
}


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= FEWEST


@pytest.fixture
def restored_determinism(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what a deterministic run sets for the whole process."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("restored_determinism")
@pytest.mark.quick_cases(14)
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


def test_a_window_that_ends_with_the_epoch() -> None:
    options = {"accumulate_grad_batches": 3}
    eager = fit(Network, [5] * 10, **options)
    captured = fit(Network, [5] * 10, capture=True, **options)
    assert_same(captured, eager)
    assert captured.replays >= 12


def test_a_module_that_is_fitted_twice() -> None:
    """A run's graphs end with it."""
    states = []
    for capture in (False, True):
        module = Network()
        torch.manual_seed(3)
        for _ in range(2):
            trainer = quiet(accelerator="cuda", devices=[0], strategy="single_device", capture=capture)
            trainer.fit(module, batches())
        states.append(module.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
