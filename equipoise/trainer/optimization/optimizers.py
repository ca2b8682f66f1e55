"""Optimisers and learning-rate schedulers, in all forms that `configure_optimizers` may return."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from equipoise.errors import ConfigurationError, ConfigurationRuntimeError
from equipoise.interop.lightning.classes import is_overridden
from equipoise.interop.torch.optimizers import has_step_hooks
from equipoise.notices import rank_zero_warn
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.validation import is_whole

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext
    from equipoise.trainer.state.progress import Progress

__all__ = [
    "NoOptimizer",
    "Schedulers",
    "gradients_of",
    "load_gradients",
    "move_state",
    "parse_optimizers",
    "takes_no_closure",
]

_FORMS = (
    "It may return an optimiser; a list or tuple of optimisers; two lists, ([optimiser], [scheduler]); a dictionary"
    " with the keys 'optimizer', 'lr_scheduler' and 'monitor', or a tuple of such dictionaries; or None for no"
    " optimiser."
)


class NoOptimizer(Optimizer):
    """Stands where `configure_optimizers` returned None: every step does nothing but run the closure."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def step(self, closure: Any = None) -> Any:
        """Runs the closure, if there is one."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing."""

    def __repr__(self) -> str:
        return "No Optimizer"


def parse_optimizers(answer: Any, module: LightningModule) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Turns the answer of `configure_optimizers` into optimisers and scheduler configurations.

    Args:
        answer: What the method returned.
        module: The user's module, which says whether optimisation is automatic.

    Raises:
        ConfigurationError: If the answer is of none of the known forms, or contradicts itself.
    """
    if answer is None:
        rank_zero_warn("`configure_optimizers` returned None: this fit runs without an optimiser.")
        answer = NoOptimizer()
    optimizers, schedulers, monitor = _take_apart(answer)
    if module.automatic_optimization and not optimizers:
        raise ConfigurationError(f"`configure_optimizers` returned {_describe(answer)}, without an optimiser. {_FORMS}")
    if module.automatic_optimization and len(optimizers) != 1:
        raise ConfigurationRuntimeError(
            f"Automatic optimisation takes one optimiser, but `configure_optimizers` returned {len(optimizers)}."
            " Set `self.automatic_optimization = False` and step them in `training_step`: `first, second ="
            " self.optimizers()`."
        )
    configs = [_scheduler_config(scheduler, monitor, module) for scheduler in schedulers]
    for config in configs:
        _check_scheduler(config, optimizers, module)
    return optimizers, configs


def _is_optimizer(value: Any) -> bool:
    """An optimiser of torch, or anything that behaves like one."""
    return isinstance(value, Optimizer) or all(hasattr(value, name) for name in ("step", "state_dict", "param_groups"))


def _take_apart(answer: Any) -> tuple[list[Optimizer], list[Any], str | None]:
    """Optimisers, schedulers and the monitored name."""
    if _is_optimizer(answer):
        return [answer], [], None
    if isinstance(answer, Mapping):
        optimizers, schedulers = _of_dictionaries([answer])
        return optimizers, schedulers, answer.get("monitor")
    if isinstance(answer, Sequence) and not isinstance(answer, str):
        if len(answer) == 2 and isinstance(answer[0], list) and all(map(_is_optimizer, answer[0])):
            optimizers, schedulers = answer
            return list(optimizers), list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers], None
        if all(isinstance(item, Mapping) for item in answer):
            return *_of_dictionaries(answer), None
        if all(map(_is_optimizer, answer)):
            return list(answer), [], None
    raise ConfigurationError(f"`configure_optimizers` returned {_describe(answer)}. {_FORMS}")


def _of_dictionaries(dictionaries: Sequence[Mapping[str, Any]]) -> tuple[list[Optimizer], list[Any]]:
    optimizers, schedulers = [], []
    for dictionary in dictionaries:
        if not _is_optimizer(dictionary.get("optimizer")):
            found = (
                f"under 'optimizer' is {_brief(dictionary['optimizer'])}"
                if "optimizer" in dictionary
                else "no 'optimizer'"
            )
            raise ConfigurationError(f"`configure_optimizers` returned {_describe(dictionary)}, but {found}. {_FORMS}")
        if extra := dictionary.keys() - {"optimizer", "lr_scheduler", "monitor"}:
            rank_zero_warn(f"Found unsupported keys in the optimizer configuration: {extra}", category=RuntimeWarning)
        optimizers.append(dictionary["optimizer"])
        if "lr_scheduler" in dictionary:
            scheduler = dictionary["lr_scheduler"]
            # A monitor beside the scheduler belongs to it, also where there are several dictionaries.
            if "monitor" in dictionary and len(dictionaries) > 1 and isinstance(scheduler, ReduceLROnPlateau):
                scheduler = {"scheduler": scheduler, "monitor": dictionary["monitor"]}
            schedulers.append(scheduler)
    return optimizers, schedulers


def _describe(answer: Any) -> str:
    if isinstance(answer, Mapping):
        return f"a dictionary with the keys {list(answer)}"
    if isinstance(answer, (list, tuple)):
        word = f"an empty {type(answer).__name__}" if not answer else f"a {type(answer).__name__} of"
        return f"{word} {', '.join(type(item).__name__ for item in answer)}".rstrip()
    return _brief(answer)


def _brief(value: Any) -> str:
    """A value and its type, on one short line."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of it"
    shown, kind = repr(value), f"of type {type(value).__name__}"
    return f"{shown} {kind}" if len(shown) <= 60 and "\n" not in shown else f"something {kind}"


def _scheduler_config(scheduler: Any, monitor: str | None, module: LightningModule) -> LRSchedulerConfig:
    """The configuration of one scheduler, with the defaults of its form."""
    if isinstance(scheduler, Mapping):
        given = dict(scheduler)
    else:
        given = {"scheduler": scheduler, "monitor": monitor if isinstance(scheduler, ReduceLROnPlateau) else None}
    if extra := given.keys() - {field.name for field in fields(LRSchedulerConfig)}:
        rank_zero_warn(f"Found unsupported keys in the lr scheduler dict: {extra}.", category=RuntimeWarning)
        given = {key: value for key, value in given.items() if key not in extra}
    if "scheduler" not in given:
        raise ConfigurationError(
            f"A learning-rate scheduler's dictionary needs the key 'scheduler', but has {list(given)}."
        )
    if given.get("interval", "epoch") not in ("step", "epoch"):
        raise ConfigurationError(
            f"The interval of a learning-rate scheduler is 'step' or 'epoch', not {given['interval']!r}."
        )
    frequency = given.get("frequency", 1)
    if not is_whole(frequency, least=1):
        raise ConfigurationError(
            f"The frequency of a learning-rate scheduler is a positive integer, not {frequency!r}."
        )
    given["monitor"] = given.get("monitor", monitor)
    if module.automatic_optimization:
        given.setdefault("reduce_on_plateau", isinstance(given["scheduler"], ReduceLROnPlateau))
        _check_automatic(given)
    else:
        if ignored := [key for key in ("reduce_on_plateau", "strict") if key in given]:
            rank_zero_warn(
                f"The lr scheduler keys {ignored} are ignored: in manual optimisation you step it yourself.",
                category=RuntimeWarning,
            )
        given = {key: value for key, value in given.items() if key not in ("reduce_on_plateau", "monitor", "strict")}
    return LRSchedulerConfig(**given)


def _check_automatic(given: dict[str, Any]) -> None:
    if given["reduce_on_plateau"] and given["monitor"] is None:
        raise ConfigurationError(
            "ReduceLROnPlateau needs the name of a logged value to watch. Return"
            " {'optimizer': optimizer, 'lr_scheduler': {'scheduler':"
            " scheduler, 'monitor': 'val_loss'}} from `configure_optimizers`."
        )
    if isinstance(given["scheduler"], OneCycleLR) and given.get("interval", "epoch") == "epoch":
        rank_zero_warn(
            "OneCycleLR steps once per epoch here. Did you mean {'interval': 'step'}?", category=RuntimeWarning
        )


def _check_scheduler(config: LRSchedulerConfig, optimizers: list[Optimizer], module: LightningModule) -> None:
    scheduler, name = config.scheduler, type(config.scheduler).__name__
    methods = [callable(getattr(scheduler, method, None)) for method in ("state_dict", "load_state_dict")]
    if isinstance(scheduler, type) or not all(methods):
        raise ConfigurationError(
            "A learning-rate scheduler is an object with the methods `step`, `state_dict` and `load_state_dict`, but"
            f" `configure_optimizers` returned {_brief(scheduler)}. Return one, such as `StepLR(optimizer, 10)`, or"
            " leave it out."
        )
    stepped_by_us = module.automatic_optimization and not is_overridden("lr_scheduler_step", module)
    if stepped_by_us and not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
        raise ConfigurationError(
            f"{name} does not follow torch's LRScheduler. Say how it steps by overriding `lr_scheduler_step` in"
            " your module."
        )
    if getattr(scheduler, "optimizer", optimizers[0]) not in optimizers:
        raise ConfigurationError(
            f"The scheduler {name} belongs to another optimiser than `configure_optimizers` returned. Make it for that"
            " one."
        )


class Schedulers:
    """Steps learning-rate schedulers when they are due, in automatic optimisation.

    Args:
        context: The run, whose state holds the configurations, which callbacks may exchange.
        progress: Counts the steps.
    """

    def __init__(self, context: "RunContext", progress: "Progress") -> None:
        self.state = context.state
        self.logs = context.logs
        self.processes = context.strategy.processes
        self.progress = progress
        self.automatic = context.module.automatic_optimization
        self.user_step = context.hooks.bind_module("lr_scheduler_step")

    def after_batch(self, index: int, *, ends: bool) -> None:
        """Steps those that watch nothing, at the end of a window.

        Args:
            index: The batch's index.
            ends: Whether it is the epoch's last.
        """
        if self.state.lr_scheduler_configs:
            self._step("step", index, plateau=False)
            if ends:
                self.end_batches()

    def end_batches(self) -> None:
        """Steps those that watch nothing, after every so many epochs."""
        self._step("epoch", self.state.current_epoch, plateau=False)

    def after_validation(self, index: int) -> None:
        """Steps those that watch a value after every so many steps."""
        if self.state.lr_scheduler_configs:
            self._step("step", index, plateau=True)

    def after_epoch(self) -> None:
        """Steps those that watch a value after every so many epochs."""
        self._step("epoch", self.state.current_epoch, plateau=True)

    def _step(self, interval: str, index: int, *, plateau: bool) -> None:
        if not self.automatic:
            return
        for config in self.state.lr_scheduler_configs:
            if config.reduce_on_plateau != plateau or config.interval != interval or (index + 1) % config.frequency:
                continue
            watched = self._watched(config) if plateau else None
            if plateau and watched is None:
                continue
            if self.user_step is not None:
                self.user_step(config.scheduler, watched)
            elif watched is None:
                config.scheduler.step()  # type: ignore[call-arg]
            else:
                config.scheduler.step(watched)
            self.progress.count()

    def _watched(self, config: LRSchedulerConfig) -> Any:
        """The value a scheduler watches; None, with a warning, if it is not there and need not be."""
        value = self.logs.callback_metrics.get(config.monitor or "")
        if self.processes.world_size > 1:  # a value of a step is each process's own
            value = self.processes.broadcast(value)
        if value is not None:
            return value
        known = ", ".join(map(repr, self.logs.callback_metrics)) or "none"
        message = f"ReduceLROnPlateau watches {config.monitor!r}, which was never logged. Logged so far: {known}."
        if config.strict:
            raise ConfigurationError(
                f"{message} Log it, name another as 'monitor', or set 'strict': False to pass it over."
            )
        rank_zero_warn(f"{message} The learning rate stays as it is.", category=RuntimeWarning)
        return None


def move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Moves an optimiser's state to a device."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.to(device)


def takes_no_closure(optimizer: Optimizer) -> bool:
    """Whether nobody can tell that an optimiser was stepped without a closure."""
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and not isinstance(optimizer, LBFGS)
        and not has_step_hooks(optimizer)
    )


def gradients_of(optimizers: Iterable[Optimizer]) -> list[torch.Tensor | None]:
    """Return the gradients of all parameters of optimisers, in order.

    Args:
        optimizers: Any optimisers of torch.
    """
    gradients: list[torch.Tensor | None] = []
    for optimizer in optimizers:
        gradients.extend(parameter.grad for parameter in optimizer_parameters(optimizer))
    return gradients


def load_gradients(optimizers: Iterable[Optimizer], gradients: Iterable[torch.Tensor | None]) -> None:
    """Set the gradients of the parameters of optimisers, on the device of each.

    Args:
        optimizers: Any optimisers of torch.
        gradients: Gradients that `gradients_of` returned. Parameters beyond them keep theirs.
    """
    parameters: list[torch.nn.Parameter] = []
    for optimizer in optimizers:
        parameters.extend(optimizer_parameters(optimizer))
    for parameter, gradient in zip(parameters, gradients, strict=False):
        if gradient is not None:
            gradient = gradient.to(parameter.device)
        parameter.grad = gradient
