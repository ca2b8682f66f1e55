"""Compiled training steps compute the same as eager ones, or stay eager with a reason."""

import csv
import gc
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from equipoise import OOMRecovery
from equipoise.extensions.compiled import speed_comparison, variants
from tests.extensions.compiled.runs import STAYS_EAGER, assert_compiled, assert_same, assert_stays_eager, fit
from tests.support.equality import assert_equal
from tests.support.lowering import Lowering
from tests.support.step_networks import (
    CLASSES,
    FEATURES,
    Apart,
    Averaging,
    Halving,
    LoggingRate,
    Network,
    OfBatch,
    Replacing,
    Shared,
)


class Changes(L.Callback):
    """Changes the module in the midst of training."""

    def __init__(self, change: Callable[[Network], Any]) -> None:
        self.change = change

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == trainer.max_epochs * trainer.num_training_batches // 2 + 1:
            self.change(module)


# Steps that are compiled


class Several(Network):
    """Two optimisers."""

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self.parameters() if parameter.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


CLIPPED = {"gradient_clip_val": 0.05}
WINDOWS = {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}
RECOVERED = {"accumulate_grad_batches": 3, "callbacks": lambda: [OOMRecovery()]}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "options"),
    [
        *((Network, {}), (Network, WINDOWS), (Network, RECOVERED), (Several, WINDOWS), (Averaging, {}), (OfBatch, {})),
        *((make, CLIPPED) for make in (Halving, Replacing, Apart, Shared, LoggingRate)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value.__name__,
)
def test_compiled_steps_are_equal_to_eager_ones(
    lowering: Lowering, make: type[Network], options: dict[str, Any]
) -> None:
    assert_compiled(lowering, make, **options)


# In a process of its own: the compiler leaves threads and environment variables behind.
KERNELS = """
import torch
from tests.extensions.compiled.runs import assert_same, fit
from tests.support.step_networks import Network

class Smooth(Network):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0].to(self.net[0].weight.dtype), batch[1]), batch_idx)

torch.set_num_threads(1)
for precision, tolerance in [("64-true", 1e-10), ("32-true", 1e-5), ("16-mixed", 1e-2)]:
    eager = fit(Smooth(), [6] * 6, precision=precision, max_epochs=1)
    compiled = fit(Smooth(), [6] * 6, precision=precision, max_epochs=1, compile=True)
    assert_same(eager, compiled, tolerance)
    print("equal", precision)
"""


@pytest.mark.slow
def test_the_compilers_own_kernels_compute_what_eager_steps_do() -> None:
    run = subprocess.run(
        [sys.executable, "-c", KERNELS], cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["equal", "64-true", "equal", "32-true", "equal", "16-mixed"]
    assert run.stderr.count("It computes the same as the eager step") >= 3, run.stderr
    assert STAYS_EAGER not in run.stderr


def test_loggers_receive_what_eager_steps_log(lowering: Lowering, tmp_path: Path) -> None:
    rows = []
    for compiled in (False, True):
        logger = CSVLogger(tmp_path, name=str(compiled))
        fit(Network(), logger=logger, log_every_n_steps=1, compile=compiled)
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            rows.append([{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)])
    assert_equal(rows[0], rows[1], 1e-9)


@pytest.mark.quick_cases(3)
@pytest.mark.thorough
@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "scale", 3.0),
        lambda module: module.net[4].weight.data.fill_(1.0),
        lambda module: module.net[0].requires_grad_(False),
        lambda module: module.net[3].eval(),
        lambda module: module.net[2].register_forward_hook(lambda layer, inputs, output: output * 2),
    ],
    ids=["an attribute", "weights", "frozen", "evaluating", "a hook"],
)
def test_changes_in_the_midst_of_training_are_noticed(lowering: Lowering, change: Callable[[Network], None]) -> None:
    assert_compiled(lowering, callbacks=lambda: [Changes(change)])


@pytest.mark.thorough
@pytest.mark.parametrize(("is_faster", "window"), [(True, 2), (False, 1)])
def test_auto_compiles_only_where_that_is_faster(
    lowering: Lowering, monkeypatch: pytest.MonkeyPatch, is_faster: bool, window: int
) -> None:
    monkeypatch.setattr(speed_comparison.SpeedComparison, "is_program_faster", lambda comparison: is_faster)
    sizes = [5] * 40
    options = {"max_epochs": 1, "accumulate_grad_batches": window}
    eager = fit(Network(), sizes, **options)
    assert_same(eager, fit(Network(), sizes, compile="auto", **options))
    # A trial, and five steps of the comparison, for the first and for further batches of a window.
    expected = 6 * window
    if is_faster:
        # All but two eager steps, the trial's, and the eager ones of the comparison.
        expected = 40 - 2 * window
        expected -= 5 * window
    assert lowering.calls == expected


@pytest.mark.thorough
def test_shapes_beyond_a_number_stay_eager(lowering: Lowering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "MOST_VARIANTS", 2)
    sizes = [2, 3, 4] * 4
    eager = fit(Network(), sizes)
    with pytest.warns(UserWarning, match="compiled for 2 shapes of batches already"):
        compiled = fit(Network(), sizes, compile=True)
    assert_same(eager, compiled)
    assert lowering.graphs == 2


def test_a_run_leaves_nothing_in_memory(lowering: Lowering) -> None:
    module = fit(Network(), compile=True).module
    assert lowering.calls
    rows = module.trainer.run_state.summary_rows
    assert rows["time to first compiled step"].endswith("s")
    assert rows["memory to be compiled"].endswith("B at the peak")
    references = [weakref.ref(module), weakref.ref(module.trainer)]
    del module
    gc.collect()
    assert [reference() for reference in references] == [None, None]


class NoDropout(Network):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def test_after_an_error_of_memory_in_the_program_steps_are_computed_in_micro_batches(lowering: Lowering) -> None:
    def run_out(call: int) -> None:
        if call == 3:
            raise torch.OutOfMemoryError("injected")

    eager = fit(NoDropout(), [6] * 8)
    lowering.around = run_out
    with pytest.warns(UserWarning, match="memory"):
        compiled = fit(NoDropout(), [6] * 8, compile=True, callbacks=[OOMRecovery()])
    assert_equal(eager.module, compiled.module, 1e-11)
    # The repeated batch, and all later ones, are computed without the program.
    assert lowering.calls == 3


@pytest.mark.thorough
def test_a_run_is_resumed_in_the_midst_of_an_epoch(lowering: Lowering, tmp_path: Path) -> None:
    eager = fit(Network(), accumulate_grad_batches=2)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "compile": True, "enable_checkpointing": True}
    saves = [ModelCheckpoint(tmp_path / name, every_n_train_steps=3, save_top_k=-1) for name in ("first", "resumed")]
    fit(Network(), max_epochs=1, callbacks=[saves[0]], **options)
    (path,) = tmp_path.glob("first/*step=3*.ckpt")
    resumed = fit(Network(), ckpt_path=path, callbacks=[saves[1]], **options)
    assert_equal(eager.module, resumed.module, 1e-11)


# Steps that stay eager


LOG: list[float] = []


class Summing(Network):
    """Changes objects of all kinds; each is a refusal of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.total = torch.zeros((), dtype=torch.float64)
        self.by_name: dict[str, list[int]] = {"a": []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if self.kind == "total":
            self.total += result["loss"].detach()
        elif self.kind == "by_name":
            self.by_name["a"].append(1)
        elif self.kind == "LOG":
            LOG.append(1.0)
        return result

    def on_train_end(self) -> None:
        self.noted = [float(self.total), self.by_name, len(LOG)]
        LOG.clear()


class WithAccuracy(Network):
    """Logs a metric, as Lightning's documents do."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.accuracy(result["logits"], batch[1])
        self.log("by_metric", self.accuracy, on_step=False, on_epoch=True)
        return result


class Printing(Network):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        print("step", batch_idx)
        return super().training_step(batch, batch_idx)


class Drawing(Network):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scale = random.random()
        return super().training_step(batch, batch_idx)


class Skipping(Network):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else result


class Weighing(Network):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {**super().training_step(batch, batch_idx), "loss_weight": float(len(batch[0]) + batch_idx)}


class Annealing(Network):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        return {**result, "loss": result["loss"] * (1 + self.global_step)}


class BeforeBackward(Network):
    def on_before_backward(self, loss: Tensor) -> None:
        pass


class OwnLog(Network):
    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **kwargs)


class OwnBackward(Network):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Searching(Network):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=2)


class Hooked(Network):
    def on_fit_start(self) -> None:
        self.net[0].weight.register_hook(lambda gradient: gradient * 2)


class Sparse(Network):
    """The traced graph ends with an error in the midst, where it has turned off gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 4, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        return {"loss": result["loss"] + self.table(batch[1]).square().mean()}


class LooksForAnomalies(Network):
    """Turns on what `Trainer(detect_anomaly=True)` turns on."""

    def on_train_start(self) -> None:
        torch.autograd.set_detect_anomaly(True)


def halve(weight: Tensor) -> None:
    weight.grad.mul_(0.5)


def hook_accumulation(module: Network) -> None:
    module.net[0].weight.register_post_accumulate_grad_hook(halve)


EAGER: dict[str, tuple[Any, dict[str, Any], str]] = {
    **{
        f"changes {kind}": (partial(Summing, kind), {}, f"because its Python code changes .*{kind}")
        for kind in ("total", "by_name", "LOG")
    },
    "updates a metric": (WithAccuracy, {}, ""),
    "prints": (Printing, {}, "builtin"),
    # Torch 2.14 traces `random`, and names what comes next.
    "draws": (Drawing, {}, "(skipped|changes self.scale)"),
    "skips": (Skipping, {}, "it returns no loss"),
    "weighs": (Weighing, {"accumulate_grad_batches": 2}, "loss_weight"),
    "reads the step": (
        Annealing,
        {"max_epochs": 3},
        "it reads `self.global_step`, whose value is a constant of a compiled step",
    ),
    "hook on an accumulation": (
        Network,
        {"callbacks": lambda: [Changes(hook_accumulation)]},
        "because there is a hook on the gradient",
    ),
    "hook before the backward": (BeforeBackward, {}, "because the hook on_before_backward runs between"),
    "own log": (OwnLog, {}, "because the module has a method `log`"),
    "own backward": (OwnBackward, {}, "because the module overrides backward"),
    "searches": (Searching, {}, "because LBFGS"),
    "hook from the start": (Hooked, {}, "because the parameter net.0.weight has a hook on its gradient"),
    "profiled": (Network, {"profiler": "simple"}, "because a profiler"),
    "anomalies": (Network, {"detect_anomaly": True}, "because detect_anomaly"),
    "anomalies by torch": (LooksForAnomalies, {}, "because detect_anomaly"),
    # The traced graph ends in the midst, where it has turned off gradients.
    "sparse gradients": (Sparse, {}, "because a compiled one ends with an error"),
}


@pytest.mark.few_cases(1)
@pytest.mark.usefixtures("lowering")
@pytest.mark.parametrize("case", EAGER)
def test_a_step_that_cannot_be_compiled_stays_eager_with_the_reason(case: str) -> None:
    make, options, reason = EAGER[case]
    assert_stays_eager(make, reason, **options)


def test_a_hook_on_all_modules_keeps_steps_eager(lowering: Lowering) -> None:
    with nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 1.01):
        assert_stays_eager(Network, "")


def test_a_program_that_fails_is_not_used(lowering: Lowering) -> None:
    def fail(call: int) -> None:
        raise ValueError("no such kernel")

    lowering.around = fail
    assert_stays_eager(Network, r"a compiled one ends with an error \(ValueError: no such kernel\)")


def test_a_program_that_differs_is_not_used(lowering: Lowering) -> None:
    modules = [Network(), Network()]

    def disturb(call: int) -> None:
        with torch.no_grad():
            modules[1].net[1].running_mean += 1e-3

    lowering.around = disturb
    reason = "because a compiled one differs: the buffer net.1.running_mean"
    assert_stays_eager(iter(modules).__next__, reason)


class OtherGradient(Network):
    """Has the same loss as it is compiled, with another gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if torch.compiler.is_compiling():
            result["loss"] = 2 * result["loss"] - result["loss"].detach()
        return result


@pytest.mark.usefixtures("lowering")
def test_a_program_with_another_gradient_is_not_used() -> None:
    assert_stays_eager(OtherGradient, "because a compiled one differs: the gradient of net.0.weight")
