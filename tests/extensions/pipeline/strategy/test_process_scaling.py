"""16-mixed over processes: real float16 on the CPU, and one scale of the loss whoever finds that it was too large."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import OOMRecovery, PipelineStrategy, Trainer
from tests.support.quiet import QUIET

pytestmark = [pytest.mark.filterwarnings("ignore:.*memory"), pytest.mark.usefixtures("quick_collections")]

WIDTH = 6
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
        self.linear, self.overflows = nn.Linear(WIDTH, WIDTH), overflows

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
        self.out = nn.Linear(WIDTH, WIDTH)
        if place:
            self.out.weight = self.blocks[0].linear.weight

    def forward(self, features: Tensor, marks: Tensor) -> Tensor:
        return self.out(self.blocks((features, marks))[0])


class Model(L.LightningModule):
    """Remembers the scale after each step.

    Args:
        place: The block in whose backward the second batch of the second epoch overflows; not in those after it.
        frozen: Whether what comes last is not trained.
        fused: Whether the optimiser unscales by itself.
    """

    def __init__(self, place: int = 0, *, frozen: bool = False, fused: bool = False, interval: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net, self.fused, self.interval = Network(place), fused, interval
        self.scales: list[Any] = []
        if frozen:
            for block in (*self.net.blocks[3:], self.net.out):
                block.requires_grad_(False)

    def on_train_start(self) -> None:
        self.trainer.scaler.set_growth_interval(self.interval)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, marks = batch
        loss = self.net(features, marks * (self.current_epoch == 1)).float().square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.scaler.state_dict())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.02, fused=self.fused or None)


def data() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(5)
    batches = []
    for number in range(3):
        marks = torch.zeros(8)
        marks[3] = number == 1
        batches.append((torch.randn(8, WIDTH, generator=draw), marks))
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def fit(
    engine: Any, *, micro_batches: int = 4, ckpt_path: Any = None, module: Any = None, plan: Any = None, **options: Any
) -> Any:
    module = module or Model(**{key: options.pop(key) for key in ("place", "frozen", "fused") if key in options})
    strategy: Any = "single_device"
    if engine != strategy:
        given = {"micro_batches": micro_batches, "cut_before": CUT, **(plan or {})}
        strategy = PipelineStrategy(engine=engine, **given)
    keeps = any(isinstance(each, ModelCheckpoint) for each in options.get("callbacks", ()))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1 if engine == "single_device" else ["cpu"] * 3,
        precision="16-mixed",
        **{**QUIET, "enable_checkpointing": keeps, "max_epochs": 2, **options},
    )
    trainer.fit(module, data(), ckpt_path=ckpt_path)
    return module, trainer


def same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    for (name, expected), actual in zip(one[0].state_dict().items(), other[0].state_dict().values(), strict=True):
        assert actual.isfinite().all(), name
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=name)
    assert other[0].scales == one[0].scales
    assert other[1].scaler.state_dict() == one[1].scaler.state_dict() == one[0].scales[-1]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("place", "clip"), [(0, None), (0, 0.05), (2, 0.05), (4, None)])
def test_a_step_is_skipped_in_all_processes(place: int, clip: float | None) -> None:
    """To the bit like threads, wherever it overflows; stages after that one find nothing wrong by themselves."""
    options = {"place": place, "gradient_clip_val": clip}
    one, other = fit("threads", **options), fit("processes", **options)
    same(one, other)
    grown = [state["scale"] for state in other[0].scales]
    assert grown == [65536.0, 2 * 65536.0, 2 * 65536.0, 4 * 65536.0, 2 * 65536.0, 2 * 65536.0]
    steps = {float(state["step"]) for state in other[1].optimizers[0].state_dict()["state"].values()}
    assert steps == {5.0}


def test_the_step_is_that_of_one_device() -> None:
    same(fit("single_device"), fit("processes", micro_batches=1), 1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "options", [{"frozen": True}, {"fused": True}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}], ids=str
)
def test_others(options: dict[str, Any]) -> None:
    """No gradient in the first process; an optimiser that unscales by itself; windows of several batches."""
    same(fit("threads", **options), fit("processes", **options))


CUTS = [*(f"net.blocks.{index}" for index in range(1, 5)), "net.out"]  # six stages
PLANS = [
    {"schedule": "interleaved_zero_bubble", "stages_per_device": 1},
    {"schedule": "interleaved_zero_bubble", "cut_before": CUTS},
    {"schedule": "interleaved_1f1b", "cut_before": CUTS},
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plan", PLANS, ids=["zero bubble", "interleaved zero bubble", "interleaved"])
def test_schedules(plan: dict[str, Any]) -> None:
    """A weight is in the first stage and the last, and the third overflows."""
    same(fit("threads", plan=plan, place=2), fit("processes", plan=plan, place=2))


class Runs(nn.Module):
    """Runs out of memory with more than two samples."""

    def forward(self, pair: Any) -> Any:
        if self.training and len(pair[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return pair


def test_a_step_that_is_done_again() -> None:
    """With the scale that it had."""

    def make(fails: bool) -> Model:
        module = Model()
        module.net.blocks[0] = nn.Sequential(module.net.blocks[0], Runs() if fails else nn.Identity())
        return module

    direct = fit("processes", module=make(False), callbacks=[OOMRecovery()])
    same(direct, fit("processes", module=make(True), micro_batches=2, callbacks=[OOMRecovery()]))


@pytest.mark.parametrize("engine", ["processes", "threads"])
def test_the_scale_goes_on(engine: str, tmp_path: Path) -> None:
    """Written right after the step that was skipped."""

    def checkpoints() -> list[Any]:
        return [ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1, filename="{step}")]

    whole = fit("processes", callbacks=checkpoints())
    state = torch.load(tmp_path / "step=5.ckpt", weights_only=True)["MixedPrecision"]
    assert (state["scale"], state["_growth_tracker"]) == (2 * 65536.0, 0)
    resumed = fit(engine, callbacks=checkpoints(), ckpt_path=tmp_path / "step=5.ckpt")
    assert resumed[0].scales == whole[0].scales
    for name, value in whole[0].state_dict().items():
        assert torch.equal(resumed[0].state_dict()[name], value), name
