"""Compiled training steps compute the same as eager ones, or stay eager with a reason."""

import gc
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from equipoise import ConfigurationError, OOMRecovery, Trainer
from equipoise.extensions.compiled import speed_comparison, variants
from tests.extensions.compiled.conftest import Lowering
from tests.support.step_networks import CLASSES, FEATURES, SIZES, Network, batches

STAYS_EAGER = "the training step stays eager"


class Losses(L.Callback):
    """Notes the loss of each batch in the module; 0 where there is none."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.seen = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.seen.append(outputs["loss"] if outputs else torch.zeros(()))


def fit(
    module: L.LightningModule, sizes: list[int] = SIZES, ckpt_path: Path | None = None, **options: Any
) -> tuple[L.LightningModule, dict[str, Any]]:
    """Train, and return the module and its metrics."""
    defaults: dict[str, Any] = {"max_epochs": 2, "precision": "64-true", "logger": False, "enable_checkpointing": False}
    options["callbacks"] = [Losses(), *options.get("callbacks", [])]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **options},
    )
    torch.manual_seed(11)
    random.seed(11)
    trainer.fit(module, batches(sizes), ckpt_path=ckpt_path)
    return module, dict(trainer.callback_metrics)


def assert_same(one: tuple[L.LightningModule, Any], other: tuple[L.LightningModule, Any], rtol: float = 1e-11) -> None:
    for (name, value), expected in zip(one[0].state_dict().items(), other[0].state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=rtol, atol=rtol, msg=lambda text, name=name: f"{name}: {text}")
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        torch.testing.assert_close(value, other[1][name], rtol=rtol, atol=rtol)
    torch.testing.assert_close(one[0].seen, other[0].seen, rtol=rtol, atol=rtol)


OPTIONS = [
    {},
    {"accumulate_grad_batches": 2},
    {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
    {"callbacks": lambda: [OOMRecovery()]},
    {"callbacks": lambda: [OOMRecovery()], "accumulate_grad_batches": 3},
]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("options", OPTIONS, ids=[", ".join(options) or "plain" for options in OPTIONS])
def test_equal_to_eager_steps(lowering: Lowering, options: dict[str, Any]) -> None:
    chosen = {name: value() if callable(value) else value for name, value in options.items()}
    again = {name: value() if callable(value) else value for name, value in options.items()}
    eager = fit(Network(), **chosen)
    assert_same(fit(Network(), compile=True, **again), eager)
    # Most steps of the 18 were computed by the program.
    assert lowering.calls >= 9


class Several(Network):
    """Two optimisers."""

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self.parameters() if parameter.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}])
def test_several_optimizers(lowering: Lowering, options: dict[str, Any]) -> None:
    assert_same(fit(Several(), compile=True, **options), fit(Several(), **options))
    assert lowering.calls >= 9


# In a process of its own: the compiler leaves threads and environment variables behind.
KERNELS = """
import torch
from tests.extensions.compiled.test_compiled_step import Network, fit

class Smooth(Network):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0].to(self.net[0].weight.dtype), batch[1]), batch_idx)

torch.set_num_threads(1)
for precision, tolerance in [("64-true", 1e-10), ("32-true", 1e-5), ("16-mixed", 1e-2)]:
    eager = fit(Smooth(), [6] * 6, precision=precision, max_epochs=1)
    compiled = fit(Smooth(), [6] * 6, precision=precision, max_epochs=1, compile=True)
    torch.testing.assert_close(compiled[0].seen, eager[0].seen, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(compiled[1]["loss"], eager[1]["loss"], rtol=tolerance, atol=tolerance)
    print("equal", precision)
"""


@pytest.mark.slow
def test_equal_by_the_compilers_own_kernels() -> None:
    run = subprocess.run(
        [sys.executable, "-c", KERNELS], cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["equal", "64-true", "equal", "32-true", "equal", "16-mixed"]
    assert run.stderr.count("It computes the same as the eager step") >= 3, run.stderr
    assert STAYS_EAGER not in run.stderr


def test_the_loggers_receive_the_same(lowering: Lowering, tmp_path: Path) -> None:
    rows = []
    for compiled in (False, True):
        logger = CSVLogger(tmp_path, name=str(compiled))
        fit(Network(), logger=logger, log_every_n_steps=1, compile=compiled)
        text = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
        rows.append([line.split(",") for line in text])
    assert rows[0][0] == rows[1][0]
    for one, other in zip(rows[0][1:], rows[1][1:], strict=True):
        assert [cell == "" for cell in one] == [cell == "" for cell in other]
        assert [float(cell) for cell in one if cell] == pytest.approx([float(cell) for cell in other if cell], rel=1e-9)


# Python code of the step


LOG: list[float] = []


class InPlain:
    total: Any = 0.0


class Summing(Network):
    """Changes objects of all kinds; each is a refusal of its own."""

    kind = ""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros((), dtype=torch.float64)
        self._private: list[int] = []
        self.by_name: dict[str, list[int]] = {"a": []}
        self.plain = InPlain()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if self.kind == "total":
            self.total += result["loss"].detach()
        elif self.kind == "_private":
            self._private.append(1)
        elif self.kind == "by_name":
            self.by_name["a"].append(1)
        elif self.kind == "plain":
            self.plain.total = self.plain.total + result["loss"].detach()
        elif self.kind == "LOG":
            LOG.append(1.0)
        return result

    def changed(self) -> list[Any]:
        return [float(self.total), self._private, self.by_name, float(self.plain.total), len(LOG)]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("kind", ["total", "_private", "by_name", "plain", "LOG"])
def test_nothing_is_changed_twice(lowering: Lowering, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(Summing, "kind", kind)
    LOG.clear()
    eager = fit(Summing())
    expected = eager[0].changed()
    LOG.clear()
    with pytest.warns(UserWarning, match=f"{STAYS_EAGER}, because its Python code changes .*{kind}"):
        compiled = fit(Summing(), compile=True)
    assert_same(compiled, eager)
    assert compiled[0].changed() == expected
    assert lowering.graphs == 0


class Averaging(Network):
    """Holds a target network that follows the other one, and changes its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(FEATURES, 8)
        self.memory = torch.zeros(20, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for parameter, target in zip(self.net[0].parameters(), self.target.parameters(), strict=True):
                target.lerp_(parameter, 0.1)
            batch[0].mul_(1.5)
            self.memory[0] += 1
        result = super().training_step(batch, batch_idx)
        result["loss"] = result["loss"] + F.mse_loss(self.net[0](batch[0]), self.target(batch[0]).detach())
        return result


def test_tensors_that_the_step_changes_in_place(lowering: Lowering) -> None:
    eager = fit(Averaging())
    compiled = fit(Averaging(), compile=True)
    assert_same(compiled, eager)
    assert float(compiled[0].memory[0]) == float(eager[0].memory[0]) == 18
    assert lowering.calls >= 9


class Popping(Network):
    """Takes the labels out of a batch that is a dictionary."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        labels = batch.pop("labels")
        return super().training_step((batch["features"], labels), batch_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"features": batch[0], "labels": batch[1]}


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


@pytest.mark.parametrize("make", [Popping, WithAccuracy])
def test_batches_and_metrics_stay_as_they_are(lowering: Lowering, make: type[Network]) -> None:
    eager = fit(make())
    with pytest.warns(UserWarning, match=STAYS_EAGER):
        compiled = fit(make(), compile=True)
    assert_same(compiled, eager)


def test_a_program_that_fails_is_not_used(lowering: Lowering) -> None:
    def fail(call: int) -> None:
        raise ValueError("no such kernel")

    lowering.around = fail
    eager = fit(Network())
    with pytest.warns(UserWarning, match=r"a compiled one ends with an error \(ValueError: no such kernel\)"):
        compiled = fit(Network(), compile=True)
    assert_same(compiled, eager)


def hook_gradient(module: Network) -> None:
    module.net[0].weight.register_hook(lambda gradient: gradient * 2)


def hook_accumulation(module: Network) -> None:
    def halve(weight: Tensor) -> None:
        weight.grad.mul_(0.5)

    module.net[0].weight.register_post_accumulate_grad_hook(halve)


@pytest.mark.parametrize("change", [hook_gradient, hook_accumulation])
def test_hooks_on_gradients_in_the_midst_of_training(lowering: Lowering, change: Callable[[Network], None]) -> None:
    eager = fit(Network(), callbacks=[Changes(change)])
    with pytest.warns(UserWarning, match=f"{STAYS_EAGER}, because there is a hook on the gradient"):
        compiled = fit(Network(), callbacks=[Changes(change)], compile=True)
    assert_same(compiled, eager)


def test_a_hook_on_all_modules(lowering: Lowering) -> None:
    with nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 1.01):
        eager = fit(Network())
        with pytest.warns(UserWarning, match=STAYS_EAGER):
            compiled = fit(Network(), compile=True)
    assert_same(compiled, eager)


def test_a_run_leaves_nothing_in_memory(lowering: Lowering) -> None:
    module, _ = fit(Network(), compile=True)
    assert lowering.calls
    rows = module.trainer.run_state.summary_rows
    assert rows["time to first compiled step"].endswith("s")
    assert rows["memory to be compiled"].endswith("B at the peak")
    references = [weakref.ref(module), weakref.ref(module.trainer)]
    del module
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_numbers_that_a_shorter_type_rounds(lowering: Lowering) -> None:
    class Rounded(Network):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("tenth", 0.1)
            return super().training_step(batch, batch_idx)

    eager = fit(Rounded())
    assert_same(fit(Rounded(), compile=True), eager)
    assert lowering.calls >= 9


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


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Printing, "builtin"),
        (Drawing, "(skipped|changes self.scale)"),  # torch 2.14 traces `random`, and names what comes next
        (Skipping, "it returns no loss"),
        (Weighing, "loss_weight"),
        (Annealing, "it reads `self.global_step`, whose value is a constant of a compiled step"),
    ],
)
def test_what_cannot_be_compiled_stays_eager(lowering: Lowering, make: Callable[[], Network], reason: str) -> None:
    options = {"accumulate_grad_batches": 2} if make is Weighing else {}
    eager = fit(make(), **options)
    state = random.getstate()
    with pytest.warns(UserWarning, match=f"{STAYS_EAGER}.*{reason}"):
        compiled = fit(make(), compile=True, **options)
    assert_same(compiled, eager)
    assert random.getstate() == state


class ByNumber(Network):
    """Does something else for some batches, and later in the training."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 4 == 3:
            self.log("fourth", 1.0)
        factor = 2.0 if self.current_epoch >= 1 else 1.0
        return super().training_step((batch[0] * factor, batch[1]), batch_idx)


@pytest.mark.slow
def test_conditions_of_python_code_hold(lowering: Lowering) -> None:
    eager = fit(ByNumber(), max_epochs=3)
    assert_same(fit(ByNumber(), max_epochs=3, compile=True), eager)
    assert lowering.calls >= 9


class Changes(L.Callback):
    """Changes the module in the midst of training."""

    def __init__(self, change: Callable[[Network], Any]) -> None:
        self.change = change

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 4:
            self.change(module)


def set_scale(module: Network) -> None:
    module.scale = 3.0


def freeze(module: Network) -> None:
    module.net[0].requires_grad_(False)


def stop_dropout(module: Network) -> None:
    module.net[3].eval()


def add_hook(module: Network) -> None:
    module.net[2].register_forward_hook(lambda layer, inputs, output: output * 2)


def replace_weight(module: Network) -> None:
    module.net[4].weight.data = torch.ones_like(module.net[4].weight)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("change", [set_scale, freeze, stop_dropout, add_hook, replace_weight])
def test_changes_in_the_midst_of_training(lowering: Lowering, change: Callable[[Network], None]) -> None:
    eager = fit(Network(), callbacks=[Changes(change)])
    calls = lowering.calls
    assert_same(fit(Network(), callbacks=[Changes(change)], compile=True), eager)
    assert lowering.calls > calls


def test_a_program_that_differs_is_not_used(lowering: Lowering) -> None:
    module = Network()

    def disturb(call: int) -> None:
        with torch.no_grad():
            module.net[1].running_mean += 1e-3

    lowering.around = disturb
    eager = fit(Network())
    with pytest.warns(
        UserWarning, match=f"{STAYS_EAGER}, because a compiled one differs: the buffer net.1.running_mean"
    ):
        compiled = fit(module, compile=True)
    assert_same(compiled, eager)


@pytest.mark.parametrize("is_faster", [True, False])
@pytest.mark.parametrize("window", [1, 2])
def test_only_where_it_is_faster(
    lowering: Lowering, monkeypatch: pytest.MonkeyPatch, is_faster: bool, window: int
) -> None:
    monkeypatch.setattr(speed_comparison.SpeedComparison, "is_program_faster", lambda comparison: is_faster)
    sizes = [5] * 40
    options = {"max_epochs": 1, "accumulate_grad_batches": window}
    eager = fit(Network(), sizes, **options)
    assert_same(fit(Network(), sizes, compile="auto", **options), eager)
    # A trial, and five steps of the comparison, for the first and for further batches of a window.
    expected = 6 * window
    if is_faster:
        # All but two eager steps, the trial's, and the eager ones of the comparison.
        expected = 40 - 2 * window
        expected -= 5 * window
    assert lowering.calls == expected


def test_many_shapes(lowering: Lowering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "MOST_VARIANTS", 2)
    sizes = [2, 3, 4] * 4
    eager = fit(Network(), sizes)
    with pytest.warns(UserWarning, match="compiled for 2 shapes of batches already"):
        compiled = fit(Network(), sizes, compile=True)
    assert_same(compiled, eager)
    assert lowering.graphs == 2


# Around the step


class AfterBackward(Network):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_after_backward(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.norms.append(float(nn.utils.get_total_norm(gradients)))


def test_the_hook_after_the_backward_sees_gradients(lowering: Lowering) -> None:
    eager = fit(AfterBackward())
    compiled = fit(AfterBackward(), compile=True)
    assert_same(compiled, eager)
    assert compiled[0].norms == pytest.approx(eager[0].norms, rel=1e-11)
    assert len(compiled[0].norms) == 18


def test_an_error_of_memory_in_the_program(lowering: Lowering) -> None:
    sizes = [6] * 8

    class NoDropout(Network):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def run_out(call: int) -> None:
        if call == 3:
            raise torch.OutOfMemoryError("injected")

    eager = fit(NoDropout(), sizes)
    lowering.around = run_out
    recovery = OOMRecovery()
    with pytest.warns(UserWarning, match="memory"):
        compiled = fit(NoDropout(), sizes, compile=True, callbacks=[recovery])
    for one, other in zip(compiled[0].parameters(), eager[0].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    # The repeated batch, and all later ones, are computed in micro-batches, without the program.
    assert lowering.calls == 3


def test_resumed_in_the_midst_of_an_epoch(lowering: Lowering, tmp_path: Path) -> None:
    eager = fit(Network(), accumulate_grad_batches=2)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    fit(Network(), accumulate_grad_batches=2, compile=True, callbacks=[saves], enable_checkpointing=True)
    path = next(tmp_path.glob("*step=3*.ckpt"))
    saves = ModelCheckpoint(tmp_path / "resumed", every_n_train_steps=3, save_top_k=-1)
    options = {"callbacks": [saves], "enable_checkpointing": True}
    resumed = fit(Network(), accumulate_grad_batches=2, compile=True, ckpt_path=path, **options)
    for name, value in resumed[0].state_dict().items():
        torch.testing.assert_close(value, eager[0].state_dict()[name], rtol=1e-11, atol=1e-11)


# Runs without compiled steps


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


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (BeforeBackward, {}, "the hook on_before_backward runs between"),
        (OwnLog, {}, "the module has a method `log`"),
        (OwnBackward, {}, "the module overrides backward"),
        (Searching, {}, "LBFGS"),
        (Hooked, {}, "the parameter net.0.weight has a hook on its gradient"),
        (Network, {"profiler": "simple"}, "a profiler"),
        (Network, {"detect_anomaly": True}, "detect_anomaly"),
    ],
)
def test_runs_that_stay_eager(
    lowering: Lowering, make: Callable[[], Network], options: dict[str, Any], reason: str
) -> None:
    eager = fit(make(), max_epochs=1, **options)
    with pytest.warns(UserWarning, match=f"{STAYS_EAGER}, because {reason}"):
        compiled = fit(make(), max_epochs=1, compile=True, **options)
    assert_same(compiled, eager)
    assert lowering.graphs == 0


@pytest.mark.parametrize("name", ["dp", "balanced", "ddp", "pipeline", "fsdp"])
def test_blocks_are_not_measured(name: str) -> None:
    """By one line, without the traceback of a worker."""
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": 1}
    trainer = Trainer(strategy=name, devices=["cpu", "cpu"], compile="auto", **options)
    with pytest.raises(ConfigurationError) as refused:
        trainer.fit(Network(), batches([4]))
    assert str(refused.value) == (
        f"compile='auto' measures whole steps, but strategy={name!r} computes them in parts. Take compile=True, which"
        " compiles blocks of the network."
    )
    assert not hasattr(refused.value, "__notes__")


def test_the_argument_is_a_flag() -> None:
    with pytest.raises(ConfigurationError, match='compile must be "auto", True or False'):
        Trainer(compile="inductor")  # type: ignore[arg-type]
