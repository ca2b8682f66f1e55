"""16-mixed on the CPU is real float16 with a real scaler: it is as if nothing had happened."""

from itertools import count
from typing import Any

import pytest
import torch

from equipoise import OOMRecovery
from tests.support.equality import assert_equal
from tests.support.networks.transparency import Mlp
from tests.trainer.recovery.out_of_memory import PHASES, Answers, OutOfMemory, fit, run_out

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:Batch \d+ (of \d+ samples)?"),
    pytest.mark.usefixtures("quick_collections"),
]


class Overflowing(Mlp):
    """Its gradients overflow in two steps; remembers what the scaler was after each."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = list[Any]()

    def on_train_start(self) -> None:
        scaler: Any = self.trainer.scaler
        scaler.set_growth_interval(2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * (1e38 if (self.current_epoch, batch_idx) in ((0, 2), (1, 1)) else 1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scaler.append(self.trainer.scaler.state_dict())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(callback: Any, injected: OutOfMemory | None = None, **options: Any) -> Overflowing:
    torch.manual_seed(7)
    module = Overflowing()
    fit(module if injected is None else injected.wrap(module), callback, precision="16-mixed", **options)
    return module


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_a_step_that_is_repeated_leaves_the_scaler_as_if_undisturbed(phase: str, window: int) -> None:
    """To the bit, scales and trackers of every step included."""
    injected = OutOfMemory(failing=(0, 2, 4, 5, 9), phase=phase)
    one = train(Answers(1), accumulate_grad_batches=window)
    other = train(Answers(1), injected, accumulate_grad_batches=window)
    assert len({state["scale"] for state in one.scaler}) > 1  # it grew or shrank
    assert_equal((one.scaler, one), (other.scaler, other))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_a_step_in_parts_leaves_the_scaler_as_if_undisturbed(phase: str, window: int) -> None:
    """Scale and growth tracker; weights as far as float16 goes."""
    one = train(OOMRecovery(), accumulate_grad_batches=window)
    other = train(OOMRecovery(), OutOfMemory(most=4, phase=phase), accumulate_grad_batches=window)
    assert one.scaler == other.scaler
    torch.testing.assert_close(dict(other.state_dict()), dict(one.state_dict()), rtol=1e-2, atol=1e-3)


def test_a_step_of_the_optimizer_that_is_repeated_leaves_the_scaler_as_if_undisturbed() -> None:
    class LowOnMemory(Overflowing):
        def configure_optimizers(self) -> Any:
            optimizer: Any = torch.optim.AdamW(self.parameters(), lr=0.1)
            step, calls = optimizer.step, count()

            def low_on_memory(*args: Any, **kwargs: Any) -> Any:
                if next(calls) == 1:
                    run_out()
                return step(*args, **kwargs)

            if self.fails:
                optimizer.step = low_on_memory
            return optimizer

    modules = []
    for fails in (False, True):
        torch.manual_seed(7)
        modules.append(module := LowOnMemory())
        module.fails = fails
        fit(module, recovery := OOMRecovery(), precision="16-mixed")
        assert [event.phase for event in recovery.events] == ["optimizer step"] * fails
    assert_equal(*((module.scaler, module) for module in modules))
