"""Muon under fsdp equals one device: it has whole matrices, of which each process keeps a shard."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon

from equipoise.extensions.fsdp.state.whole_matrices import WholeMatrices
from tests.extensions.fsdp.modules import Matrices
from tests.extensions.fsdp.programs import (
    STEP,
    SavesAfter,
    assert_close,
    assert_same_cases,
    fit,
    fsdp,
    in_processes,
    weights_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks", "ignore:The run began with")


class Alone(Matrices):
    """Muon alone steps the matrices; nothing else is trained."""

    def configure_optimizers(self) -> Any:
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
        return super().configure_optimizers()[0]


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "Muon and AdamW": (Matrices, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    "Muon alone": (Alone, {}),
}


def trained(case: str, strategy: Any = "single_device", processes: int = 1) -> list[Any]:
    """Return the weights, and the states of the optimisers after the fit."""
    kind, options = CASES[case]
    module, trainer = fit(kind, strategy, processes, **options)
    states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
    assert states[0]
    return [weights_of(module), states]


@pytest.mark.slow
def test_training_with_muon_equals_that_of_one_device() -> None:
    assert_same_cases(3, [*CASES], trained, partial(trained, strategy=fsdp(), processes=3))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", ["full", "sharded"])
def test_a_checkpoint_is_continued_on_one_device(checkpoints: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    fit(Matrices, fsdp(checkpoints=checkpoints), 2, callbacks=[SavesAfter(path, 3)])
    module, _ = fit(Matrices, batch_size=STEP // 2, ckpt_path=path)
    assert_close(weights_of(fit(Matrices)[0]), weights_of(module))


class Overflows(Matrices):
    """The gradient of one entry overflows in the second step: it lies in the shard of one process."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            loss = loss + self.first.weight[0, 0] * 1e36
        return loss


def overflowing() -> list[dict[str, Tensor]]:
    """Return the weights after one step, after two and after three."""
    options: dict[str, Any] = {"precision": "16-mixed", "max_epochs": 1}
    return [weights_of(fit(Overflows, "fsdp", 2, max_steps=steps, **options)[0]) for steps in (1, 2, 3)]


@pytest.mark.slow
def test_an_overflow_in_one_shard_skips_the_step_in_all_processes() -> None:
    one, two, three = in_processes(2, overflowing)
    assert_close(one, two, 0.0)
    assert not torch.equal(two["first.weight"], three["first.weight"])
    assert not torch.equal(two["last.bias"], three["last.bias"])


class Fails(Muon):
    """Fails at the second matrix."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("the second one")
        return super().step(closure)


def test_a_failed_step_leaves_no_state_of_gathered_matrices() -> None:
    matrices = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    for matrix in matrices:
        matrix.grad = torch.ones(2, 2)
    optimizer = Fails(matrices)
    with pytest.raises(RuntimeError, match="the second one"):
        WholeMatrices(optimizer).step()
    assert [id(parameter) for parameter in optimizer.state] == [id(matrices[0])]
    assert optimizer.param_groups[0]["params"] == matrices
