"""16-mixed over processes: real float16 on the CPU, and one scale of the loss whoever finds that it was too large."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import OOMRecovery
from tests.support.batches import FEATURES
from tests.support.equality import assert_equal
from tests.support.networks.layers import Task
from tests.support.one_device import Run
from tests.support.pipelines import EachStep, fit, pipelined

pytestmark = [pytest.mark.filterwarnings("ignore:.*memory"), pytest.mark.usefixtures("quick_collections")]

CUT = ["net.blocks.1", "net.blocks.3"]  # three stages


class Overflow(torch.autograd.Function):
    """Gradients of marked samples are infinite, as if their scale were too large for float16."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, marks: Tensor) -> Tensor:
        ctx.save_for_backward(marks)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (marks,) = ctx.saved_tensors
        return gradient * torch.where(marks > 0, float("inf"), 1.0).unsqueeze(-1), None


class Block(nn.Module):
    def __init__(self, overflows: bool) -> None:
        super().__init__()
        self.linear, self.overflows = nn.Linear(FEATURES, FEATURES), overflows

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, marks = pair
        made = self.linear(hidden)
        if self.overflows:
            made = Overflow.apply(made, marks)
        return torch.tanh(made), marks


class Network(nn.Module):
    """The first layer and the last may have the same weight: then the last stage sees what overflows in the first."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(index == place) for index in range(5)))
        self.out = nn.Linear(FEATURES, FEATURES)
        if place:
            self.out.weight = self.blocks[0].linear.weight

    def forward(self, features: Tensor, marks: Tensor) -> Tensor:
        return self.out(self.blocks((features, marks))[0])


class Model(Task):
    """Remembers the scale after each step.

    Args:
        place: The block in whose backward the second batch of the second epoch overflows; not in those after it.
        frozen: Whether what comes last is not trained.
        fused: Whether the optimiser unscales by itself.
        last: A further layer of the first block. Default: none.
    """

    def __init__(
        self, place: int = 0, *, frozen: bool = False, fused: bool = False, last: nn.Module | None = None
    ) -> None:
        super().__init__(Network(place))
        self.fused, self.scales = fused, list[Any]()
        if last is not None:
            self.net.blocks[0] = nn.Sequential(self.net.blocks[0], last)
        if frozen:
            for block in (*self.net.blocks[3:], self.net.out):
                block.requires_grad_(False)

    def on_train_start(self) -> None:
        self.trainer.scaler.set_growth_interval(2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        marks = torch.zeros_like(batch["label"], dtype=torch.float32)
        if self.current_epoch == 1 and batch_idx == 1:
            marks = (batch["label"] == 0).float()
        loss = self.net(batch["features"].mean(1), marks).float().square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.scaler.state_dict())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.02, fused=self.fused or None)


def run(engine: str, options: dict[str, Any] | None = None, *, plan: Any = None, **of_model: Any) -> Run:
    """Train three batches twice, in three stages, or on one device."""
    given = {"micro_batches": 4, "cut_before": CUT, **(plan or {})}
    stages = {} if engine == "one device" else pipelined(3, engine=engine, timeout=300.0, **given)
    return fit(lambda: Model(**of_model), (8, 8, 8), precision="16-mixed", **stages, **(options or {}))


def same(one: Run, other: Run, tolerance: float = 0.0) -> None:
    assert all(weight.isfinite().all() for weight in other.module.state_dict().values())
    assert_equal(one.module, other.module, tolerance)
    assert other.module.scales == one.module.scales
    assert other.trainer.scaler.state_dict() == one.trainer.scaler.state_dict() == one.module.scales[-1]


@pytest.mark.quick_cases(2)
@pytest.mark.thorough
@pytest.mark.parametrize(("place", "clip"), [(0, 0.05), (2, 0.05), (4, None)])
def test_a_step_is_skipped_in_all_processes(place: int, clip: float | None) -> None:
    """To the bit like threads, wherever it overflows; stages after that one find nothing wrong by themselves."""
    one, other = (run(engine, {"gradient_clip_val": clip}, place=place) for engine in ("threads", "processes"))
    same(one, other)
    grown = [state["scale"] for state in other.module.scales]
    assert grown == [65536.0, 2 * 65536.0, 2 * 65536.0, 4 * 65536.0, 2 * 65536.0, 2 * 65536.0]
    steps = {float(state["step"]) for state in other.trainer.optimizers[0].state_dict()["state"].values()}
    assert steps == {5.0}


@pytest.mark.thorough
def test_a_scaled_step_is_that_of_one_device() -> None:
    same(run("one device"), run("processes", plan={"micro_batches": 1}), 1e-6)


CUTS = [*(f"net.blocks.{index}" for index in range(1, 5)), "net.out"]  # six stages
CASES: dict[str, dict[str, Any]] = {
    "no gradient in the first process": {"frozen": True},
    "an optimiser that unscales by itself": {"fused": True},
    "windows of several batches": {"options": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}},
    # A weight is in the first stage and the last, and the third overflows.
    "zero bubble": {"place": 2, "plan": {"schedule": "interleaved_zero_bubble", "cut_before": CUTS}},
}


@pytest.mark.quick_cases(2)
@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_processes_compute_as_threads_do(case: str) -> None:
    # The gradients of a weight in two stages may be added in another order.
    same(run("threads", **CASES[case]), run("processes", **CASES[case]), 1e-6 if "place" in CASES[case] else 0.0)


class RunsOut(nn.Module):
    """Runs out of memory with more than two samples."""

    def forward(self, pair: Any) -> Any:
        if self.training and len(pair[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return pair


@pytest.mark.thorough
def test_a_step_is_done_again_with_the_scale_that_it_had() -> None:
    recovery = {"callbacks": [OOMRecovery()]}
    direct = run("processes", recovery, last=nn.Identity())
    same(direct, run("processes", recovery, last=RunsOut(), plan={"micro_batches": 2}))


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["processes", "threads"])
def test_the_scale_goes_on_from_a_checkpoint(engine: str, tmp_path: Path) -> None:
    """Written right after the step that was skipped."""
    saves = {"callbacks": [EachStep(tmp_path)]}
    whole, path = run("processes", saves), tmp_path / "step=5.ckpt"
    state = torch.load(path, weights_only=True)["MixedPrecision"]
    assert (state["scale"], state["_growth_tracker"]) == (2 * 65536.0, 0)
    resumed = run(engine, {"ckpt_path": path})
    assert resumed.module.scales[-1] == whole.module.scales[-1]
    assert_equal(whole.module, resumed.module)
