"""Steps within the backward: the numbers of the usual step to the bit, fewer gradients, and early refusals."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from equipoise import Callback, MemoryLogger, OOMRecovery, StepError, Strategy, Trainer
from tests.support.equality import assert_equal
from tests.support.step_networks import FEATURES, batches
from tests.support.trainer_runs import refuses, trainer

OPTIMIZERS = {
    "SGD": lambda groups: SGD(groups, 0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda groups: AdamW(groups, 0.01, weight_decay=0.1),
    "AdamW foreach": lambda groups: AdamW(groups, 0.01, foreach=True),
    "AdamW fused": lambda groups: AdamW(groups, 0.01, fused=True),
    "Adafactor": lambda groups: Adafactor(groups, 0.05),
    "NAdam": lambda groups: NAdam(groups, 0.01),
}


class Module(L.LightningModule):
    """A tied weight, a frozen layer, a layer that some steps leave out, two groups and a scheduler."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, 6)
        self.tied = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.rare = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)
        self.optimizer = optimizer
        self.rates: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        hidden = self.first(batch[0].to(self.first.weight.dtype)).tanh()
        hidden = self.tied(self.frozen(self.tied(hidden).tanh()))
        if batch_idx % 3 != 1:
            hidden = self.rare(hidden)
        return self.last(hidden).float().square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*self.first.parameters(), *self.frozen.parameters()], "weight_decay": 0.01},
            {"params": [*self.tied.parameters(), *self.rare.parameters(), *self.last.parameters()]},
        ]
        optimizer = OPTIMIZERS[self.optimizer](groups)
        return [optimizer], [{"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}]


def fit(module: L.LightningModule, ckpt_path: Path | None = None, **options: Any) -> Any:
    """Train for 14 steps, the last of an epoch with fewer samples."""
    run = trainer(**{"max_epochs": 2, "precision": "64-true", **options})
    run.fit(module, batches([4] * 6 + [2]), ckpt_path=ckpt_path)
    return module


def assert_same_training(expected: Any, actual: Any) -> None:
    """Compare weights, states of the optimisers and counters to the bit."""
    outcomes = []
    for module in (expected, actual):
        assert module.trainer.global_step == 14
        outcomes.append([module.state_dict(), module.trainer.optimizers[0].state_dict()])
    assert_equal(*outcomes)


@pytest.mark.few_cases(7)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_and_optimizer_states_are_those_of_the_usual_step(optimizer: str) -> None:
    usual, module = fit(Module(optimizer)), fit(Module(optimizer), step_in_backward=True)
    assert_same_training(usual, module)
    assert module.rates == usual.rates


class RunsABackwardElsewhere(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first(batch[0]).sum().backward()


class ThawsALayer(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.frozen.requires_grad_(batch_idx >= 2)


class SkipsABatch(Module):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return None if batch_idx == 3 else super().training_step(batch, batch_idx)


class LoadsAnOptimizerState(Callback):
    """Brings new groups of the optimiser between two steps, and then lowers the rate."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        (optimizer,) = trainer.optimizers
        if batch_idx == 2:
            optimizer.load_state_dict(optimizer.state_dict())
            for group in optimizer.param_groups:
                group["lr"] *= 0.01


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Module, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (Module, {"precision": "bf16-mixed"}),
        (Module, {"precision": "32-true", "fused_optimizer": True}),
        (Module, {"activation_checkpointing": ["tied", "rare"]}),
        (Module, {"callbacks": [MemoryLogger(every_n_steps=1, detail="modules", leaks=False)]}),
        (Module, {"callbacks": [LoadsAnOptimizerState()]}),
        (RunsABackwardElsewhere, {}),
        (ThawsALayer, {}),
        (SkipsABatch, {}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value.__name__,
)
def test_other_arguments_and_unusual_steps_change_nothing(kind: type[Module], options: dict[str, Any]) -> None:
    assert_same_training(fit(kind(), **options), fit(kind(), step_in_backward=True, **options))


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_a_resumed_run_may_step_in_the_other_way(before: bool, after: bool, tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    fit(Module(), step_in_backward=before, callbacks=[saves], enable_checkpointing=True, max_epochs=1)
    (path,) = tmp_path.glob("*step=5*.ckpt")
    with pytest.warns(UserWarning, match="states of callbacks that are missing"):
        resumed = fit(Module(), path, step_in_backward=after)
    assert_same_training(fit(Module()), resumed)


class Deep(Module):
    """Eight layers whose gradients are larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0].float().repeat(1, 11)[:, :64]).square().mean()

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.layers.parameters(), 0.1)


def test_step_in_backward_saves_the_memory_of_gradients() -> None:
    """Of 8 gradients of 16 KiB at most two exist, the one that is stepped and the next one."""
    peaks = []
    for in_backward in (False, True):
        memory = MemoryLogger(detail="modules", leaks=False)
        fit(Deep(), step_in_backward=in_backward, callbacks=[memory], precision="32-true")
        peaks.append(memory.compositions[0].nbytes)
    assert peaks[0] - peaks[1] >= 6 * 64 * 64 * 4


def test_gradients_are_gone_after_each_step_and_hooks_after_the_run() -> None:
    seen: list[Any] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            seen.extend(parameter.grad for parameter in pl_module.parameters())

    module = fit(Module(), step_in_backward=True, callbacks=[Looks()])
    assert seen == [None] * 14 * 10
    module.training_step([torch.ones(1, FEATURES)], 0).backward()
    assert module.first.weight.grad is not None


class TwoGradients(Module):
    """Adds up the gradient of a tied weight in two backwards, as reentrant checkpoints do."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0].requires_grad_()
        hidden = checkpoint(self.first, inputs, use_reentrant=True)
        return hidden.square().mean() + checkpoint(self.first, inputs, use_reentrant=True).mean()


def test_a_second_gradient_in_one_step_is_an_error() -> None:
    with pytest.raises(StepError, match="received a second gradient in the same step"):
        fit(TwoGradients(), step_in_backward=True)


# Refusals


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class LooksAtGradients(Callback):
    def on_before_optimizer_step(self, *args: Any) -> None:
        pass


class ClipsFromALaterStepOn(Callback):
    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.gradient_clip_val = 1.0


def overriding(name: str) -> Module:
    return type("Overriding", (Module,), {name: lambda *args, **kwargs: pytest.fail("no step may run")})()


def with_optimizer(make: Any) -> Module:
    module = Module()
    module.configure_optimizers = lambda: make(module.parameters())  # type: ignore[method-assign]
    return module


class Own(Adam):
    """An optimiser of the user."""


def hooked(parameters: Any) -> Optimizer:
    optimizer = Adam(parameters)
    optimizer.register_step_post_hook(lambda *args: None)
    return optimizer


class OfTheUser(Strategy):
    """A strategy that does not say that its gradients are complete after the backward."""

    name = "of_the_user"


TWO = {"devices": ["cpu", "cpu"]}


@pytest.mark.parametrize(
    ("module", "options", "reason"),
    [
        (Module(), {"gradient_clip_val": 1.0}, "gradient_clip_val by norm"),
        (Module(), {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        (Module(), {"precision": "16-mixed"}, "precision='16-mixed'"),
        (Module(), {"compile": True}, "compile gives all gradients together"),
        (Module(), {"strategy": "dp", **TWO}, "strategy='dp'"),
        (Module(), {"strategy": "pipeline", **TWO}, "strategy='pipeline'"),
        (Module(), {"strategy": OfTheUser()}, "strategy='of_the_user'"),
        (Module(), {"callbacks": [OOMRecovery()]}, "OOMRecovery"),
        (Module(), {"callbacks": [GradientAccumulationScheduler({1: 2})]}, "GradientAccumulationScheduler"),
        (Module(), {"callbacks": [LooksAtGradients()]}, "LooksAtGradients.on_before_optimizer_step"),
        (ByHand(), {}, "optimises by hand"),
        (overriding("on_after_backward"), {}, "Overriding.on_after_backward"),
        (overriding("configure_gradient_clipping"), {}, "Overriding.configure_gradient_clipping"),
        (overriding("optimizer_step"), {}, "Overriding.optimizer_step"),
        (with_optimizer(LBFGS), {}, "LBFGS steps all parameters together"),
        (with_optimizer(Own), {}, "Own is not one of torch's"),
        (with_optimizer(hooked), {}, "a hook on the step of Adam"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_go_with_steps_in_the_backward_is_refused_before_a_step(
    module: Module, options: dict[str, Any], reason: str
) -> None:
    refuses(lambda: fit(module, step_in_backward=True, **options), "step_in_backward=True", reason)
    assert module.rates == []


def test_clipping_by_norm_from_a_later_step_on_is_refused() -> None:
    callbacks = [ClipsFromALaterStepOn()]
    refuses(lambda: fit(Module(), step_in_backward=True, callbacks=callbacks), "gradient_clip_val by norm")


def test_the_argument_is_a_flag() -> None:
    refuses(lambda: Trainer(step_in_backward="yes"), "step_in_backward must be True or False")  # type: ignore[arg-type]
