"""Replicas that differ end the run in all processes, with the parameter and the ranks; others are left in peace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from equipoise import DDPStrategy, FSDPStrategy, StepError
from equipoise.parallel.divergence.differences import differences, divergence_error
from equipoise.parallel.divergence.replicated import unchanging_buffers
from tests.support.trainer_runs import Small, loader, trainer

DDP = [DDPStrategy(), DDPStrategy(engine="native")]
NAMES = ["torch", "native"]


class Watched(Small):
    """Calls a function in each process after each batch, with its rank.

    Attributes:
        scale: A buffer that no layer of statistics has.
    """

    def __init__(self, change: Callable[["Watched"], None]) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.norm = nn.BatchNorm1d(2)
        self.change = change

    def loss(self, batch: Any) -> Any:
        return super().loss(self.norm(batch[0])) * self.scale

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.change(self)


def of_rank(rank: int, change: Callable[[Watched], Any], *, step: int = 1) -> Callable[[Watched], None]:
    """A change of the module in one process, after a number of optimiser steps."""

    @torch.no_grad()
    def change_in_rank(module: Watched) -> None:
        if module.global_rank == rank and module.global_step == step:
            change(module)

    return change_in_rank


def fit(strategy: Any, change: Callable[[Watched], Any], devices: int = 2, **options: Any) -> None:
    run = trainer(strategy=strategy, devices=devices, **{"max_epochs": 2, **options})
    run.fit(Watched(change), loader(4 * devices))


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", DDP, ids=NAMES)
def test_replicas_that_differ_at_the_end_of_an_epoch_are_named_by_parameter_and_ranks(strategy: Any) -> None:
    change = of_rank(1, lambda module: module.layer.bias.add_(1e-3), step=6)
    match = (
        r"^Replicas differ between processes: layer\.bias is not the same in rank 1 as in ranks 0 and 2\. All agreed"
        r" after optimiser step 4; this is step 8, so"
    )
    with pytest.raises(StepError, match=match) as caught:
        fit(strategy, change, devices=3)
    assert "\n" not in str(caught.value)


def test_the_first_step_is_compared_at_once() -> None:
    with pytest.raises(StepError, match=r"agreed before the first optimiser step; this is step 1,.*global_rank"):
        fit("ddp", of_rank(0, lambda module: module.layer.weight.neg_()), max_epochs=1)


def test_a_checkpoint_is_not_written_of_replicas_that_differ(tmp_path: Any) -> None:
    class Saving(Watched):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    run = trainer(strategy="ddp", devices=2)
    with pytest.raises(StepError, match=r"norm\.weight .*after optimiser step 2; this is step 3"):
        run.fit(Saving(of_rank(1, lambda module: module.norm.weight.mul_(2), step=3)), loader(8))
    assert {path.name for path in tmp_path.iterdir()} == {"0.ckpt", "1.ckpt", "2.ckpt"}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [(DDPStrategy(engine="native"), {}), (FSDPStrategy(), {}), ("ddp", {"limit_train_batches": 1})],
    ids=["ddp", "fsdp", "one batch in an epoch"],
)
def test_a_buffer_that_one_process_has_changed(strategy: Any, options: dict[str, Any]) -> None:
    with pytest.raises(StepError, match="the buffer scale is not the same in rank 1 as in rank 0"):
        fit(strategy, of_rank(1, lambda module: module.scale.mul_(2)), **options)


def test_a_buffer_that_changes_with_a_batch_which_one_process_lacks() -> None:
    module = Watched(lambda module: module.scale.mul_(2))
    module.norm = nn.Identity()
    trainer(strategy="ddp", devices=2, max_epochs=2).fit(module, loader(1, 1))


@pytest.mark.thorough
def test_shards_of_two_replicas_are_compared() -> None:
    """Ranks 0 and 1 have the first and the second half, ranks 2 and 3 the same once more."""
    change = of_rank(3, lambda module: module.norm.weight.to_local().add_(1))
    with pytest.raises(StepError, match=r"norm\.weight is not the same in rank 3 as in rank 1\."):
        fit(FSDPStrategy(replicas=2), change, devices=4)


class Apart(DDPStrategy):
    """Exchanges nothing, by design."""

    def forward_backward(self, step: Any, parts: Any, last: bool) -> Any:
        result = step(parts[0])
        step.backward(result)
        return result

    def finish_gradients(self, window: Any, optimizer: Any) -> None:
        return None


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", [*DDP, FSDPStrategy(replicas=2), Apart()], ids=[*NAMES, "replicas", "apart"])
def test_statistics_that_may_differ_between_processes_are_no_error(strategy: Any) -> None:
    """Statistics of samples, numbers that a process draws, and what a strategy of the user's keeps apart."""

    def change(module: Watched) -> None:
        module.norm.running_mean.add_(module.global_rank)
        module.scale.fill_(2 + module.global_rank)

    fit(strategy, change)


def test_buffers_that_steps_do_not_change_are_compared() -> None:
    part = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    part.register_buffer("scale", torch.ones(1))
    part.register_buffer("count", torch.ones(1, dtype=torch.int64))
    part[1].register_buffer("rotation", torch.ones(1, dtype=torch.complex64))
    part[1].register_buffer("cache", torch.ones(1), persistent=False)
    assert list(unchanging_buffers(part)) == ["scale", "1.rotation"]


def test_differences_of_parts_that_some_processes_hold() -> None:
    digests = [{"left": {"a": 1, "b": 2}}, {"right": {"a": 5}}, {"left": {"a": 1, "b": 3}}, {"right": {"c": 5}}]
    message = str(divergence_error(list(differences(digests)), 0, 3))
    assert "b is not the same in rank 2 as in rank 0. 2 other tensors differ, too. All agreed before the" in message
    of_five = list(differences([{"": {"a": value}} for value in (1, 2, 3, 2, 2)]))
    assert "in rank 0 or in rank 2 as in ranks 1, 3 and 4." in str(divergence_error(of_five, 1, 2))
