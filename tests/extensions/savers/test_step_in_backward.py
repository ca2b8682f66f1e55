"""Steps within the backward: the numbers of the usual step to the bit, fewer gradients, and early refusals."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Callback, ConfigurationError, MemoryLogger, OOMRecovery, StepError, Trainer
from tests.support.trainer_runs import refuses

KINDS = {
    "SGD": lambda groups: SGD(groups, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda groups: Adam(groups, 0.01, amsgrad=True),
    "AdamW": lambda groups: AdamW(groups, 0.01, weight_decay=0.1),
    "AdamW foreach": lambda groups: AdamW(groups, 0.01, foreach=True),
    "AdamW fused": lambda groups: AdamW(groups, 0.01, fused=True),
    "Adagrad": lambda groups: Adagrad(groups, 0.05),
    "Adafactor": lambda groups: Adafactor(groups, 0.05),
    "NAdam": lambda groups: NAdam(groups, 0.01),
    "RMSprop": lambda groups: RMSprop(groups, 0.01, centered=True),
}


class Module(L.LightningModule):
    """A regression with tied weights, a frozen layer, a layer that some steps leave out, two groups and a scheduler.

    Args:
        kind: The optimiser.
        width: The width of the layers.
    """

    def __init__(self, kind: str = "AdamW", width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, width)
        self.tied = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.rare = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)
        self.kind = kind
        self.rates: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
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
        optimizer = KINDS[self.kind](groups)
        scheduler = {"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def loader() -> DataLoader[Any]:
    data = torch.randn(26, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(data), 4)


def fit(module: L.LightningModule, ckpt_path: Path | None = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {"max_epochs": 2, "precision": "64-true", "enable_checkpointing": False, "devices": 1}
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **options},
    )
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return module


def assert_equal(one: L.LightningModule, other: L.LightningModule) -> None:
    """Compare weights, states of the optimisers and counters to the bit."""
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert one.trainer.global_step == other.trainer.global_step
    states = [module.trainer.optimizers[0].state_dict() for module in (one, other)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for number, state in states[0]["state"].items():
        for key, value in state.items():
            other_value = states[1]["state"][number][key]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other_value)), (number, key)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_steps(kind: str) -> None:
    module = fit(Module(kind), step_in_backward=True)
    usual = fit(Module(kind))
    assert_equal(module, usual)
    assert module.rates == usual.rates
    assert module.trainer.global_step == 14


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
        {"precision": "32-true", "fused_optimizer": True},
        {"activation_checkpointing": ["tied", "rare"]},
        {"callbacks": [MemoryLogger(every_n_steps=1, detail="modules", leaks=False)]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_with_other_arguments(options: dict[str, Any]) -> None:
    assert_equal(fit(Module(), step_in_backward=True, **options), fit(Module(), **options))


def test_resumed(tmp_path: Path) -> None:
    whole = fit(Module())
    for before, after in ((True, True), (True, False), (False, True)):
        folder = tmp_path / f"{before} {after}"
        saves = ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1)
        options = {"callbacks": [saves], "enable_checkpointing": True, "max_epochs": 1}
        fit(Module(), step_in_backward=before, **options)
        path = next(folder.glob("*step=5*.ckpt"))
        with pytest.warns(UserWarning, match="states of callbacks that are missing"):
            resumed = fit(Module(), path, step_in_backward=after)
        assert_equal(resumed, whole)


class Deep(L.LightningModule):
    """Layers whose gradients are larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0].float().repeat(1, 22)[:, :64]).square().mean()

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), 0.1)


def test_gradients_never_exist_at_once() -> None:
    """To the byte: of 8 gradients of 16 KiB at most two exist, the one that is stepped and the next one."""
    largest = {}
    for in_backward in (False, True):
        memory = MemoryLogger(detail="modules", leaks=False)
        fit(Deep(), step_in_backward=in_backward, callbacks=[memory], precision="32-true")
        (peak,) = memory.compositions
        largest[in_backward] = peak.nbytes
    assert largest[False] - largest[True] >= 6 * 64 * 64 * 4


def test_gradients_are_gone_and_hooks_removed() -> None:
    seen: list[list[Any]] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            seen.append([parameter.grad for parameter in pl_module.parameters()])

    module = fit(Module(), step_in_backward=True, callbacks=[Looks()])
    assert len(seen) == 14
    assert all(gradient is None for gradients in seen for gradient in gradients)
    module.training_step([torch.ones(1, 3)], 0).backward()
    assert module.first.weight.grad is not None


class Looking(Module):
    """Runs a backward of its own outside of the training step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first(batch[0]).sum().backward()


def test_other_backwards_step_nothing() -> None:
    assert_equal(fit(Looking(), step_in_backward=True), fit(Looking()))


class Thawing(Module):
    """Trains the frozen layer from the middle of an epoch on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.frozen.requires_grad_(True)


class Skipping(Module):
    """Skips a batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return None if batch_idx == 3 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Thawing, Skipping])
def test_unusual_steps(kind: type[Module]) -> None:
    assert_equal(fit(kind(), step_in_backward=True), fit(kind()))


class TwoGradients(Module):
    """Adds up the gradient of a tied weight in two backwards, as reentrant checkpoints do."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0].to(self.first.weight.dtype).requires_grad_()
        hidden = checkpoint(self.first, inputs, use_reentrant=True)
        again = checkpoint(self.first, inputs, use_reentrant=True)
        return hidden.square().mean() + again.mean()


def test_a_second_gradient_is_an_error() -> None:
    with pytest.raises(StepError, match="received a second gradient in the same step"):
        fit(TwoGradients(), step_in_backward=True)


# Refusals.


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class LooksAtGradients(Callback):
    def on_before_optimizer_step(self, *args: Any) -> None:
        pass


def overriding(name: str) -> Module:
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("no step may run")

    return type("Overriding", (Module,), {name: hook})()


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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val by norm"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ({"precision": "16-mixed"}, "precision='16-mixed'"),
        ({"compile": True}, "compile gives all gradients together"),
        ({"strategy": "dp", "devices": ["cpu", "cpu"]}, "strategy='dp'"),
        ({"strategy": "pipeline", "devices": ["cpu", "cpu"]}, "strategy='pipeline'"),
        ({"callbacks": [OOMRecovery()]}, "OOMRecovery"),
        ({"callbacks": [GradientAccumulationScheduler({1: 2})]}, "GradientAccumulationScheduler"),
        ({"callbacks": [LooksAtGradients()]}, "LooksAtGradients.on_before_optimizer_step"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_settings(options: dict[str, Any], reason: str) -> None:
    refuses(lambda: fit(Module(), step_in_backward=True, **options), "step_in_backward=True", reason)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (ByHand(), "optimises by hand"),
        (overriding("on_before_optimizer_step"), "Overriding.on_before_optimizer_step"),
        (overriding("on_after_backward"), "Overriding.on_after_backward"),
        (overriding("configure_gradient_clipping"), "Overriding.configure_gradient_clipping"),
        (overriding("optimizer_step"), "Overriding.optimizer_step"),
        (with_optimizer(LBFGS), "LBFGS steps all parameters together"),
        (with_optimizer(Own), "Own is not one of torch's"),
        (with_optimizer(hooked), "a hook on the step of Adam"),
    ],
)
def test_refused_modules(module: Module, reason: str) -> None:
    refuses(lambda: fit(module, step_in_backward=True), "step_in_backward=True", reason)
    assert module.rates == []


def test_clipping_by_norm_from_a_later_step_on() -> None:
    class Clips(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.gradient_clip_val = 1.0

    with pytest.raises(ConfigurationError, match="gradient_clip_val by norm"):
        fit(Module(), step_in_backward=True, callbacks=[Clips()])


def test_the_argument_is_a_flag() -> None:
    with pytest.raises(ConfigurationError, match="step_in_backward must be True or False"):
        Trainer(step_in_backward="yes")  # type: ignore[arg-type]


class Reloading(Callback):
    """Loads the optimiser's own state between two steps, which brings new groups, and then lowers the rate."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        (optimizer,) = trainer.optimizers
        if batch_idx == 2:
            optimizer.load_state_dict(optimizer.state_dict())
            for group in optimizer.param_groups:
                group["lr"] *= 0.01


def test_groups_of_a_state_that_was_loaded_within_the_run() -> None:
    modules = [Module(), Module()]
    for module, step_in_backward in zip(modules, (False, True), strict=True):
        fit(module, step_in_backward=step_in_backward, callbacks=[Reloading()])
    assert_equal(*modules)
