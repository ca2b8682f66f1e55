"""Several optimisers in automatic optimisation: equal to a loop written by hand, under each strategy, and resumed."""

from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from equipoise import HogwildStrategy, OOMRecovery, PipelineStrategy, StepError
from tests.support.equality import assert_equal
from tests.support.pipelines import quiet
from tests.support.resumption import SavesInHooks
from tests.support.trainer_runs import refuses

FEATURES = 6
BATCH = 8
# Two epochs of as many batches; two of them are a window.
BATCHES = 10
EPOCHS = 2
CLIP = 0.05


class Net(L.LightningModule):
    """Two layers, whose matrices and biases have different optimisers.

    Args:
        kinds: The optimisers of the matrices and of the biases.
    """

    def __init__(self, kinds: str = "Muon and AdamW") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kinds = kinds
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
        self.double()

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def make_optimizers(self) -> tuple[list[Any], list[Any]]:
        """The optimisers, and for each a scheduler that steps after every step."""
        matrices = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        biases = [parameter for parameter in self.parameters() if parameter.dim() == 1]
        optimizers: list[Any]
        if self.kinds == "Muon and AdamW":
            optimizers = [Muon(matrices, lr=0.02), AdamW(biases, lr=0.01)]
        else:
            optimizers = [SGD(matrices, lr=0.5, momentum=0.9), Adam(biases, lr=0.02)]
        return optimizers, [StepLR(optimizers[0], 4, 0.5), ExponentialLR(optimizers[1], 0.9)]

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = self.make_optimizers()
        return optimizers, [{"scheduler": scheduler, "interval": "step"} for scheduler in schedulers]


def loader(processes: int = 1) -> DataLoader[Any]:
    torch.manual_seed(1)
    samples = torch.randn(BATCH * BATCHES, FEATURES, dtype=torch.float64)
    targets = samples[:, :2].sin()
    return DataLoader(TensorDataset(samples, targets), batch_size=BATCH // processes)


def by_hand(module: Net, clip: Any = nn.utils.clip_grad_norm_, *, scaled: bool = False) -> Net:
    """The loop; with a scaler, for which one optimiser of all parameters unscales."""
    optimizers, schedulers = module.make_optimizers()
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    scaler, all_together = torch.amp.GradScaler("cpu", enabled=scaled), SGD(parameters, lr=0.0)
    for _ in range(EPOCHS):
        for index, batch in enumerate(loader()):
            if index % 2 == 0:
                module.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                loss = module.training_step(batch, index)
            scaler.scale(loss / 2).backward()
            if index % 2 == 0:
                continue
            scaler.unscale_(all_together)
            clip(parameters, CLIP)
            scaler.step(all_together)
            scaler.update()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
    return module


def fit(module: Any, processes: int = 1, ckpt_path: Path | None = None, **options: Any) -> Any:
    trainer = quiet(max_epochs=EPOCHS, accumulate_grad_batches=2, gradient_clip_val=CLIP, **options)
    trainer.fit(module, loader(processes), ckpt_path=ckpt_path)
    return trainer


def weights(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


KINDS = ["Muon and AdamW", "SGD and Adam"]


@pytest.mark.parametrize("kinds", KINDS)
def test_several_optimizers_stepped_together_equal_a_loop_by_hand(kinds: str) -> None:
    module = Net(kinds)
    trainer = fit(module)
    assert trainer.global_step == EPOCHS * BATCHES // 2
    assert_equal(by_hand(Net(kinds)), module)


def test_gradients_of_two_optimizers_are_clipped_by_value() -> None:
    module = Net()
    fit(module, gradient_clip_algorithm="value")
    expected = by_hand(Net(), nn.utils.clip_grad_value_)
    assert_equal(expected, module)
    assert not torch.equal(weights(expected), weights(by_hand(Net())))


def test_fused_optimizers_equal_plain_ones() -> None:
    module = Net("SGD and Adam")
    trainer = fit(module, fused_optimizer=True)
    assert [optimizer.param_groups[0]["fused"] for optimizer in trainer.optimizers] == [True, True]
    assert_equal(by_hand(Net("SGD and Adam")), module, 1e-12)


def test_an_optimizer_without_a_fused_form_is_named() -> None:
    with pytest.warns(UserWarning, match="fused_optimizer=True has no effect on Muon"):
        trainer = fit(Net(), fused_optimizer=True)
    assert trainer.optimizers[1].param_groups[0]["fused"] is True


STRATEGIES: dict[str, dict[str, Any]] = {
    "dp": {"strategy": "dp", "devices": ["cpu", "cpu"]},
    "balanced": {"strategy": "balanced", "devices": ["cpu", "cpu"]},
    "ddp": {"strategy": "ddp", "devices": 2, "processes": 2},
    "fsdp": {"strategy": "fsdp", "devices": 2, "processes": 2},
    "pipeline": {"strategy": "pipeline", "devices": ["cpu", "cpu"]},
    "pipeline in processes": {"strategy": PipelineStrategy(engine="processes"), "devices": ["cpu", "cpu"]},
    "replicas of a pipeline": {
        "strategy": PipelineStrategy(engine="processes", replicas=2),
        "devices": ["cpu"] * 4,
        "processes": 2,
    },
    "virtual": {"strategy": "virtual", "devices": ["cpu", "cpu"]},
    "hogwild": {"strategy": HogwildStrategy(processes=1)},
    "hogwild, shared": {"strategy": HogwildStrategy(processes=1, optimizer_state="shared")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_optimizers_equal_one_device_under_each_strategy(name: str) -> None:
    module = Net()
    trainer = fit(module, **STRATEGIES[name])
    assert trainer.global_step == EPOCHS * BATCHES // 2
    assert_equal(by_hand(Net()), module, 1e-12)


# The loss in float16.


class Unscaled(Net):
    """The same in 32 bits."""

    def __init__(self, kinds: str) -> None:
        super().__init__(kinds)
        self.float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([part.float() for part in batch], batch_idx)


@pytest.mark.parametrize("kinds", KINDS)
def test_one_scaler_for_two_optimizers_equals_a_loop_by_hand(kinds: str) -> None:
    module = Unscaled(kinds)
    fit(module, precision="16-mixed")
    expected = by_hand(Unscaled(kinds), scaled=True)
    assert_equal(expected, module)


class Overflows(Unscaled):
    """The gradients of one parameter overflow in the third window."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 4:
            loss = loss + self.net[-1].bias.sum() * 1e36
        return loss


SCALED = ["ddp", "fsdp", "pipeline in processes"]


def windows(number: int, **options: Any) -> tuple[Tensor, list[float]]:
    """The weights and learning rates after some windows."""
    module = Overflows("SGD and Adam")
    processes = options.pop("processes", 1)
    trainer = quiet(precision="16-mixed", accumulate_grad_batches=2, limit_train_batches=2 * number, **options)
    trainer.fit(module, loader(processes))
    return weights(module), [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]


@pytest.mark.parametrize(
    "options",
    [{}, {"fused_optimizer": True}, *(pytest.param(STRATEGIES[name], marks=pytest.mark.slow) for name in SCALED)],
    ids=["one device", "fused", *SCALED],
)
def test_an_overflow_in_one_gradient_skips_all(options: dict[str, Any]) -> None:
    assert not torch.equal(windows(1, **options)[0], windows(2, **options)[0])
    before, rates = windows(2, **options)
    after, same_rates = windows(3, **options)
    assert torch.equal(before, after)
    assert rates == same_rates


# Out-of-memory errors.


class LowOnMemory(SGD):
    """Memory runs out in its second step."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise torch.OutOfMemoryError("injected in the step")
        return super().step(closure)


class Fails(Net):
    """Memory runs out in the step of one of two optimisers."""

    def make_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizers, _ = super().make_optimizers()
        kinds = [LowOnMemory if self.kinds == name else SGD for name in ("first", "second")]
        groups = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
        optimizers = [kind(group, lr=0.1, momentum=0.9) for kind, group in zip(kinds, groups, strict=True)]
        return optimizers, [StepLR(optimizer, 4, 0.5) for optimizer in optimizers]


def test_a_step_that_has_changed_nothing_is_repeated() -> None:
    module = Fails("first")
    with pytest.warns(UserWarning, match=r"in optimizer step\. It is done once more"):
        fit(module, callbacks=[OOMRecovery()])
    assert_equal(by_hand(Fails("neither")), module, 1e-12)


def test_a_step_of_which_one_optimizer_has_taken_its_part_is_not_repeated() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"in optimizer step.* already"):
        fit(Fails("second"), callbacks=[OOMRecovery()])


# Hooks.

HOOKS = (
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "on_before_zero_grad",
    "on_before_optimizer_step",
)


def noting(name: str) -> Any:
    """A hook that notes the optimiser that it receives, without another effect."""

    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        received = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.optim.Optimizer)]
        self.received.append((name, *received))
        getattr(super(type(self), self), name)(*args, **kwargs)

    return hook


Hooked = type("Hooked", (Net,), {name: noting(name) for name in HOOKS})


@pytest.mark.parametrize("options", [{}, {"precision": "16-mixed"}], ids=["plain", "scaled"])
def test_hooks_are_called_once_a_step_with_one_optimizer_for_all(options: dict[str, Any]) -> None:
    module, expected = Hooked(), Net()
    module.received = []
    trainer = fit(module, **options)
    fit(expected, **options)
    assert torch.equal(weights(module), weights(expected))
    assert Counter(name for name, _ in module.received) == dict.fromkeys(HOOKS, trainer.global_step)
    for _, optimizer in module.received:
        assert optimizer.optimizers == trainer.optimizers
        states = {id(state) for part in trainer.optimizers for state in part.state.values()}
        assert {id(state) for state in optimizer.state.values()} == states


def test_the_rates_of_all_are_changed_in_optimizer_step() -> None:
    class Warm(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            optimizer.step(closure=optimizer_closure)

    module = Warm()
    fit(module)
    assert torch.equal(weights(module), weights(Net()))


def test_one_of_them_cannot_be_stepped_by_itself() -> None:
    class Steps(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            self.optimizers()[1].step(closure=optimizer_closure)

    refuses(lambda: fit(Steps()), "AdamW", "together", "automatic_optimization = False", error=StepError)


def test_hooks_of_each_optimizer_run_with_its_steps() -> None:
    seen: list[str] = []

    class Watched(Net):
        def configure_optimizers(self) -> Any:
            configured = super().configure_optimizers()
            for optimizer in configured[0]:
                optimizer.register_step_pre_hook(lambda one, args, kwargs: seen.append(type(one).__name__))
            return configured

    trainer = fit(Watched())
    assert seen == ["Muon", "AdamW"] * trainer.global_step


def test_learning_rates_of_two_optimizers_are_logged(tmp_path: Path) -> None:
    trainer = fit(Net(), logger=CSVLogger(tmp_path), log_every_n_steps=1, callbacks=[LearningRateMonitor("step")])
    assert {"lr-Muon", "lr-AdamW"} <= set(trainer.callback_metrics)


# Checkpoints.


def resumed(folder: Path, batch: int, kinds: str, **options: Any) -> tuple[Net, dict[str, Any]]:
    """Return the module of a run that continues behind a batch of the second epoch, and the checkpoint."""
    fit(Net(kinds), callbacks=[SavesInHooks(folder, ["on_train_batch_end"], [BATCHES + batch + 1])], **options)
    path = folder / f"on_train_batch_end-{BATCHES + batch + 1}.ckpt"
    fit(module := Net(kinds), ckpt_path=path, **options)
    return module, torch.load(path, weights_only=False)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("batch", [6, 7], ids=["in a window", "between windows"])
def test_a_killed_run_of_two_optimizers_is_resumed_exactly(batch: int, kinds: str, tmp_path: Path) -> None:
    module, checkpoint = resumed(tmp_path, batch, kinds)
    assert torch.equal(weights(module), weights(by_hand(Net(kinds))))
    assert [len(state["state"]) for state in checkpoint["optimizer_states"]] == [3, 3]
    assert [state["last_epoch"] for state in checkpoint["lr_schedulers"]] == [checkpoint["global_step"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "pipeline in processes"])
def test_a_killed_run_of_two_optimizers_is_resumed_under_each_strategy(name: str, tmp_path: Path) -> None:
    module, checkpoint = resumed(tmp_path, 6, "Muon and AdamW", **STRATEGIES[name])
    assert_equal(by_hand(Net()), module, 1e-12)
    assert [len(state["state"]) for state in checkpoint["optimizer_states"]] == [3, 3]
