"""Muon under fsdp equals one device: it has whole matrices, of which each process keeps a shard."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from equipoise import Callback
from equipoise.extensions.fsdp.state.whole_matrices import WholeMatrices
from tests.extensions.fsdp.programs import Net, assert_close, fit, fsdp, in_processes, weights_of


class Matrices(Net):
    """The matrices are stepped by Muon, and all else by AdamW; no step uses one of the matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3, bias=False)

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self.parameters() if parameter.dim() != 2]
        return Muon(matrices, lr=0.02), AdamW(others, lr=0.01)


class Alone(Matrices):
    """Muon alone steps the matrices; nothing else is trained."""

    def configure_optimizers(self) -> Any:
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
        return super().configure_optimizers()[0]


class ByHand(Matrices):
    """Steps both by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "Muon and AdamW": (Matrices, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    "Muon alone": (Alone, {}),
    "by hand": (ByHand, {"count": 48}),
}


def trained(strategy: Callable[[], Any], processes: int) -> dict[str, dict[str, Tensor]]:
    """The weights of each case, and the states of its optimisers after the fit."""
    outcomes = {}
    for name, (kind, options) in CASES.items():
        module, trainer = fit(kind, strategy(), processes, **options)
        outcomes[name] = weights_of(module)
        for number, optimizer in enumerate(trainer.optimizers):
            states = optimizer.state_dict()["state"]
            for index, state in states.items():
                outcomes[name] |= {f"{number}/{index}/{key}": value for key, value in state.items()}
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_training_equals_that_of_one_device(processes: int, replicas: int) -> None:
    expected = trained(lambda: "single_device", 1)
    outcomes = in_processes(processes, partial(trained, partial(fsdp, replicas=replicas), processes))
    for name, values in expected.items():
        assert any(key.startswith("0/") for key in values)
        assert_close(values, outcomes[name])


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", ["full", "sharded"])
def test_a_checkpoint_is_continued_on_one_device(checkpoints: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"

    class Saves(Callback):
        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    def save() -> None:
        fit(Matrices, fsdp(checkpoints=checkpoints), 2, callbacks=[Saves()])

    in_processes(2, save)
    expected, _ = fit(Matrices)
    module, _ = fit(Matrices, ckpt_path=path)
    assert_close(weights_of(expected), weights_of(module))


class Overflows(Matrices):
    """The gradient of one entry overflows in the second step: it lies in the shard of one process."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            loss = loss + self.first.weight[0, 0] * 1e36
        return loss


def overflowing(strategy: str, processes: int) -> list[dict[str, Tensor]]:
    """The weights after one step, after two and after three."""
    weights = []
    for steps in (1, 2, 3):
        module, _ = fit(Overflows, strategy, processes, precision="16-mixed", max_steps=steps, max_epochs=1)
        weights.append(weights_of(module))
    return weights


@pytest.mark.slow
def test_an_overflow_in_one_shard_skips_the_step_in_all_processes() -> None:
    one, two, three = in_processes(2, partial(overflowing, "fsdp", 2))
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


def test_a_failed_step_leaves_no_state_of_what_was_gathered() -> None:
    matrices = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    for matrix in matrices:
        matrix.grad = torch.ones(2, 2)
    optimizer = Fails(matrices)
    with pytest.raises(RuntimeError, match="the second one"):
        WholeMatrices(optimizer).step()
    assert [id(parameter) for parameter in optimizer.state] == [id(matrices[0])]
    assert optimizer.param_groups[0]["params"] == matrices
