"""Every form that `configure_optimizers` may return, and when learning-rate schedulers step."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from equipoise import ConfigurationError, Trainer
from equipoise.trainer.optimization.configuration.optimizers import takes_no_closure
from tests.support.equality import assert_equal
from tests.support.trainer_runs import Small, loader, trainer, with_optimizers


def sgd(module: nn.Module) -> SGD:
    return SGD(module.parameters(), lr=0.1)


def both(module: nn.Module, make: Callable[[SGD], Any] = lambda optimizer: StepLR(optimizer, 1)) -> tuple[SGD, Any]:
    """An optimiser and a scheduler of it."""
    optimizer = sgd(module)
    return optimizer, make(optimizer)


def as_dictionary(module: nn.Module, make: Any = None, **config: Any) -> dict[str, Any]:
    optimizer, scheduler = both(module, make or (lambda optimizer: StepLR(optimizer, 1)))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **config} if config else scheduler}


def lists(module: nn.Module, **config: Any) -> Any:
    optimizer, scheduler = both(module)
    return [optimizer], [{"scheduler": scheduler, **config} if config else scheduler]


FORMS: dict[str, Callable[[Any], Any]] = {
    "an optimiser": sgd,
    "a list": lambda m: [sgd(m)],
    "a tuple": lambda m: (sgd(m),),
    "two lists": lists,
    "two lists, the second empty": lambda m: ([sgd(m)], []),
    "a list and a scheduler": lambda m: (lambda o, s: ([o], s))(*both(m)),
    "two lists with configuration": lambda m: lists(m, interval="step", frequency=3, name="rate"),
    "a dictionary": lambda m: {"optimizer": sgd(m)},
    "a dictionary with a scheduler": as_dictionary,
    "a dictionary with a configuration": lambda m: as_dictionary(m, interval="step", frequency=2, strict=False),
    "a tuple of dictionaries": lambda m: (as_dictionary(m),),
    "a list of dictionaries": lambda m: [as_dictionary(m, interval="step")],
    "plateau": lambda m: {**as_dictionary(m, ReduceLROnPlateau), "monitor": "loss"},
    "plateau in a configuration": lambda m: as_dictionary(m, ReduceLROnPlateau, monitor="loss", frequency=2),
    "a monitor that nobody watches": lambda m: {**as_dictionary(m), "monitor": "loss"},
    "one that is said to watch": lambda m: as_dictionary(m, reduce_on_plateau=True, monitor="loss"),
}
BY_HAND: dict[str, Callable[[Any], Any]] = {
    "an optimiser": sgd,
    "several": lambda m: [sgd(m), Adam(m.parameters())],
    "several with schedulers": lambda m: (lambda a, b: ([a[0], b[0]], [a[1], b[1]]))(both(m), both(m)),
    "dictionaries": lambda m: (as_dictionary(m, interval="step"), {"optimizer": Adam(m.parameters())}),
    "no list": lambda m: ([], []),
}


def described(run: Any) -> list[Any]:
    """Return the optimisers and schedulers that a trainer has."""
    optimizers = [type(optimizer).__name__ for optimizer in run.optimizers]
    configs = []
    for config in run.lr_scheduler_configs:
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        configs.append({**fields, "scheduler": type(config.scheduler).__name__})
    return [optimizers, configs]


@pytest.mark.few_cases(20)
@pytest.mark.parametrize(
    ("automatic", "name"), [*((True, name) for name in FORMS), *((False, name) for name in BY_HAND)]
)
def test_forms_of_configure_optimizers_mean_what_they_mean_to_lightning(automatic: bool, name: str) -> None:
    seen = []
    for cls in (L.Trainer, Trainer):
        module = with_optimizers((FORMS if automatic else BY_HAND)[name])
        module.automatic_optimization = automatic
        run = trainer(cls, max_steps=0)
        run.fit(module, loader())
        seen.append(described(run))
    assert seen[0] == seen[1]


def test_a_fit_without_an_optimiser_trains_nothing() -> None:
    module = with_optimizers(lambda m: None)
    before = module.layer.weight.detach().clone()
    run = trainer()
    with pytest.warns(UserWarning, match="returned None: this fit runs without an optimiser"):
        run.fit(module, loader())
    assert torch.equal(module.layer.weight, before)
    assert module.ran == ["training"] * 3
    assert repr(run.optimizers) == "[No Optimizer]"


class Duck:
    """Behaves like an optimiser without being one of torch."""

    def __init__(self, inner: SGD) -> None:
        self.inner = inner
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return self.inner.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def test_an_object_with_the_methods_of_an_optimiser_is_taken() -> None:
    module = with_optimizers(lambda m: Duck(sgd(m)))
    run = trainer()
    run.fit(module, loader(3))
    assert run.optimizers[0].steps == 3


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (
            lambda m: {"optimizer": sgd(m), "scheduler": 1},
            r"unsupported keys in .*'scheduler'}; the keys are .*'lr_sched",
        ),
        (lambda m: as_dictionary(m, freq=2), r"lr scheduler dict: \{'freq'\}. Did you mean 'frequency'\?"),
        (lambda m: as_dictionary(m, lambda o: OneCycleLR(o, 1.0, 9)), "OneCycleLR steps once per epoch"),
    ],
)
def test_keys_that_are_not_used_are_named_in_a_warning(configure: Callable[[Any], Any], message: str) -> None:
    module = with_optimizers(configure)
    with pytest.warns(RuntimeWarning, match=message):
        trainer(max_steps=0).fit(module, loader())


def test_keys_without_meaning_in_manual_optimisation_are_named_in_a_warning() -> None:
    module = with_optimizers(lambda m: as_dictionary(m, strict=True, reduce_on_plateau=False))
    module.automatic_optimization = False
    with pytest.warns(RuntimeWarning, match=r"\['reduce_on_plateau', 'strict'\] are ignored"):
        trainer(max_steps=0).fit(module, loader())


class Warmup:
    """A scheduler that follows no interface but its own."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_foreign_scheduler_is_stepped_by_the_module() -> None:
    warmup = Warmup()

    class Module(Small):
        def configure_optimizers(self) -> Any:
            return [sgd(self)], [{"scheduler": warmup, "interval": "step", "frequency": 2}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.seen.append((self.global_step, metric))

    trainer(max_epochs=2).fit(Module(), loader())
    assert warmup.seen == [(2, None), (4, None), (6, None)]
    with pytest.raises(ConfigurationError, match=r"Warmup does not follow torch's LRScheduler.*lr_scheduler_step"):
        trainer().fit(with_optimizers(lambda m: ([sgd(m)], [Warmup()])), loader())


class Counting(StepLR):
    """Writes down at which epoch and step it was stepped."""

    def __init__(self, optimizer: Any, module: Any) -> None:
        self.module, self.at = module, []
        super().__init__(optimizer, 1)
        self.at.clear()

    def step(self, *args: Any) -> None:
        if getattr(self.module, "_trainer", None) is not None:
            self.at.append((self.module.current_epoch, self.module.global_step))
        super().step()


@settings(max_examples=12)
@given(
    interval=st.sampled_from(["step", "epoch"]),
    frequency=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    batches=st.integers(1, 5),
    epochs=st.integers(1, 4),
)
def test_schedulers_of_any_interval_and_frequency_step_when_they_are_due(
    interval: str, frequency: int, accumulate: int, batches: int, epochs: int
) -> None:
    """Those of epochs as in Lightning; those of steps with every so many optimiser steps of the run."""

    def stepped(cls: Any) -> list[tuple[int, int]]:
        def configure(module: Any) -> Any:
            return as_dictionary(module, partial(Counting, module=module), interval=interval, frequency=frequency)

        run = trainer(cls, max_epochs=epochs, accumulate_grad_batches=accumulate)
        run.fit(with_optimizers(configure), loader(batches))
        return run.lr_scheduler_configs[0].scheduler.at  # type: ignore[no-any-return]

    if interval == "epoch":
        expected = stepped(L.Trainer)
    else:
        windows = math.ceil(batches / accumulate)
        expected = [((step - 1) // windows, step) for step in range(frequency, epochs * windows + 1, frequency)]
    assert stepped(Trainer) == expected


@pytest.mark.parametrize("plateau", [False, True])
@pytest.mark.parametrize("cls", [Trainer, L.Trainer])
def test_a_frequency_beyond_the_epoch_counts_on_in_a_resumed_run(cls: Any, plateau: bool, tmp_path: Path) -> None:
    class Module(Small):
        def __init__(self) -> None:
            super().__init__()
            self.rates: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            self.log("one", 1.0)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            make = partial(ReduceLROnPlateau, patience=0) if plateau else None
            return as_dictionary(self, make, interval="step", frequency=5, monitor="one")

    first, second = trainer(cls, max_epochs=1), Module()
    first.fit(Module(), loader(3))
    first.save_checkpoint(tmp_path / "three.ckpt")
    trainer(max_epochs=5).fit(second, loader(3), ckpt_path=tmp_path / "three.ckpt")
    # The first value that a plateau sees is its best.
    powers = [1] * 7 + [2] * 5 if plateau else [1] * 2 + [2] * 5 + [3] * 5
    assert second.rates[-12:] == pytest.approx([0.1**power for power in powers])


def test_a_schedule_of_steps_does_not_step_where_on_train_batch_start_returns_minus_1() -> None:
    class Module(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    configure = lambda module: as_dictionary(module, partial(Counting, module=module), interval="step")  # noqa: E731
    run = trainer(max_epochs=2)
    run.fit(with_optimizers(configure, Module), loader(4))
    assert run.lr_scheduler_configs[0].scheduler.at == [(0, 1), (0, 2), (1, 3), (1, 4)]


def test_optimizers_that_a_callback_exchanges_step_in_the_next_epoch() -> None:
    class Exchanges(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 1:
                trainer.optimizers = [SGD(pl_module.parameters(), lr=0.0)]

    def trained(epochs: int, *callbacks: L.Callback) -> Small:
        torch.manual_seed(4)
        module = with_optimizers(sgd)
        trainer(max_epochs=epochs, callbacks=[*callbacks]).fit(module, loader(3))
        return module

    assert_equal(trained(1), trained(2, Exchanges()))


def test_an_optimiser_that_decides_by_the_loss_or_has_a_hook_takes_the_closure() -> None:
    layer = nn.Linear(2, 1)
    optimizer = sgd(layer)
    assert takes_no_closure(optimizer)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    assert not takes_no_closure(optimizer)
    assert not takes_no_closure(LBFGS(layer.parameters()))
