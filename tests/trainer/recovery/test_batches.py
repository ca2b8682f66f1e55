"""Steps that take things out of their batch, or put some in, are done again on the batch as it was."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import Callback, OOMRecovery, Split
from tests.support.batches import Batches
from tests.support.equality import assert_equal
from tests.support.networks.transparency import Mlp
from tests.support.pairs import pairwise
from tests.support.trainer_runs import trainer
from tests.trainer.recovery.out_of_memory import run_out

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:Batch \d+ (of \d+ samples?|ran out)", r"ignore:cpu \(number \d\) ran out"),
    pytest.mark.usefixtures("quick_collections"),
]
SIZES = [6, 4, 5, 6, 2]
STRATEGIES = [("single_device", 1), ("dp", 2), ("balanced", 3)]


class Pops(Mlp):
    """Takes its labels out of the batch before memory runs out, as trainers of language models do.

    Args:
        most: More samples than this do not fit.
        phase: "forward" or "backward".

    Attributes:
        left: The keys of the batches that `on_train_batch_end` received.
    """

    def __init__(self, most: int = 10**6, phase: str = "forward") -> None:
        super().__init__()
        self.most, self.phase = most, phase
        self.left: list[list[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch.pop("label")
        batch["seen"] = True
        runs_out = len(labels) > self.most
        if runs_out and self.phase == "forward":
            run_out()
        loss = nn.functional.cross_entropy(self(batch["features"]), labels)
        if runs_out:
            loss.register_hook(run_out)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        labels = batch.pop("label")
        if len(labels) > self.most:
            run_out()
        self.log("val_loss", nn.functional.cross_entropy(self(batch["features"]), labels))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.left.append(sorted(batch))


def fit(module: Pops, *callbacks: Any, **options: Any) -> Any:
    """Train the module from weights that are always the same; return the values of the validation."""
    torch.manual_seed(7)
    module.load_state_dict(Pops().state_dict())
    options = {"precision": "64-true", "max_epochs": 2, "num_sanity_val_steps": 0, **options}
    run = trainer(callbacks=list(callbacks), **options)
    data = DataLoader(Batches(SIZES), batch_size=None)
    run.fit(module, data, data)
    return dict(run.callback_metrics)


@pytest.mark.quick_cases(4)
@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("phase", "on", "window"), pairwise(["forward", "backward"], STRATEGIES, [1, 2]))
def test_weights_are_those_of_whole_batches(phase: str, on: tuple[str, int], window: int) -> None:
    recovery, expected, module = OOMRecovery(grow_after=2), Pops(), Pops(1, phase)
    values = fit(expected, accumulate_grad_batches=window)
    strategy, devices = on
    found = fit(module, recovery, strategy=strategy, devices=devices, accumulate_grad_batches=window)
    assert {event.phase for event in recovery.events} == {phase, "evaluation"}
    assert_equal((values, expected), (found, module), 1e-12)


class SameAgain(Callback):
    """Has the whole batch done again."""

    def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> Split:
        pl_module.most = 10**6
        return Split(1)


@pytest.mark.parametrize("window", [1, 2])
def test_what_a_good_attempt_leaves_in_the_batch_is_what_hooks_see(window: int) -> None:
    options = {"accumulate_grad_batches": window, "limit_val_batches": 0}
    fit(expected := Pops(), **options)
    fit(module := Pops(3), SameAgain(), **options)
    assert module.left == expected.left
    assert "label" not in module.left[0]
    assert "seen" in module.left[0]


def test_without_a_callback_the_error_is_that_of_the_allocator() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        fit(Pops(3))
