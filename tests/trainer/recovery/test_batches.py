"""Steps that take things out of their batch, or put some in, are done again on the batch as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import Callback, OOMRecovery, Split, Trainer
from tests.support.batches import Batches
from tests.support.networks.transparency import Base, Mlp
from tests.support.trainer_runs import trainer
from tests.trainer.recovery.test_recovery import OutOfMemory

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:Batch \d+ (of \d+ samples?|ran out)", r"ignore:cpu \(number \d\) ran out"),
    pytest.mark.usefixtures("quick_collections"),
]
SIZES = [6, 4, 5, 6, 2]
STRATEGIES = [("single_device", 1), ("dp", 2), ("balanced", 3)]


class Pops(Mlp):
    """Takes its labels out of the batch before memory runs out, as trainers of language models do.

    Attributes:
        most: More samples than this do not fit.
        phase: "forward" or "backward".
        left: The keys of the batches that `on_train_batch_end` received.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 10**6
        self.phase = "forward"
        self.left: list[list[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch.pop("label")
        batch["seen"] = True
        runs_out = len(labels) > self.most
        if runs_out and self.phase == "forward":
            raise torch.OutOfMemoryError("injected")
        loss = nn.functional.cross_entropy(self(batch["features"]), labels)
        if runs_out:
            loss.register_hook(OutOfMemory.fail)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        labels = batch.pop("label")
        if len(labels) > self.most:
            raise torch.OutOfMemoryError("injected")
        self.log("val_loss", nn.functional.cross_entropy(self(batch["features"]), labels))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.left.append(sorted(batch))


def fit(
    make: Callable[[], Base],
    most: int,
    phase: str = "forward",
    strategy: str = "single_device",
    devices: int = 1,
    callbacks: tuple[Any, ...] = (),
    **options: Any,
) -> tuple[Any, Trainer]:
    torch.manual_seed(7)
    module: Any = make()
    module.most = most
    module.phase = phase
    given = {"strategy": strategy, "devices": devices, "callbacks": list(callbacks), **options}
    run: Trainer = trainer(precision="64-true", max_epochs=2, **given)
    data = DataLoader(Batches(SIZES), batch_size=None)
    run.fit(module, data, data)
    return module, run


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
@pytest.mark.parametrize("window", [1, 2])
def test_weights_are_those_of_whole_batches(phase: str, strategy: str, devices: int, window: int) -> None:
    recovery = OOMRecovery(grow_after=2)
    options = {"num_sanity_val_steps": 0, "accumulate_grad_batches": window}
    whole, expected = fit(Pops, 10**6, **options)
    module, actual = fit(Pops, 1, phase, strategy, devices, (recovery,), **options)
    assert {event.phase for event in recovery.events} == {phase, "evaluation"}
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-12, atol=1e-13)
    assert float(actual.callback_metrics["val_loss"]) == pytest.approx(
        float(expected.callback_metrics["val_loss"]), rel=1e-12
    )


class SameAgain(Callback):
    """Has the whole batch done again."""

    def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> Split:
        pl_module.most = 10**6
        return Split(1)


@pytest.mark.parametrize("window", [1, 2])
def test_what_a_good_attempt_leaves_in_the_batch_is_what_hooks_see(window: int) -> None:
    expected, _ = fit(Pops, 10**6, accumulate_grad_batches=window, limit_val_batches=0)
    module, _ = fit(Pops, 3, callbacks=(SameAgain(),), accumulate_grad_batches=window, limit_val_batches=0)
    assert module.left == expected.left
    assert "label" not in module.left[0]
    assert "seen" in module.left[0]


def test_without_a_callback_the_error_is_that_of_the_allocator() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        fit(Pops, 3)
