"""Writes down every hook that fires, with its arguments and the state of the run at that moment.

Objects are watched by giving them a subclass of their own class, so they stay what they are. Hooks that do nothing by
default are always watched. Steps, loaders, transfers and the like are watched where the user's class defines them: a
wrapper around Lightning's default would count as an override and send both trainers down another path than users take.
"""

import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["Watch"]

CHECKPOINT_HOOKS = ("on_save_checkpoint", "on_load_checkpoint")
QUIET_CALLBACK_NAMES = ("state_dict", "load_state_dict")
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
CONFIGURE = ("configure_optimizers", "configure_callbacks", "configure_gradient_clipping", "configure_model")
STAND_INS = ("_MockOptimizer", "NoOptimizer")  # what the trainers hand on where a module has no optimiser
OPTIMISATION = ("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward")


def _functions(*classes: type) -> list[str]:
    return [name for cls in classes for name, value in vars(cls).items() if callable(value) and name[0] != "_"]


def _has_effect(name: str) -> bool:
    """Return True if Lightning's default of this hook does something, or an override changes what the trainer does."""
    return (
        "_model_" in name or "batch_transfer" in name or not (name.startswith("on_") or name in ("setup", "teardown"))
    )


class Watch:
    """A list of lines, one for each hook that fired.

    Attributes:
        lines: Who was called, how, and what the trainer said of itself then.
        trainer: Set once there is one.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.trainer: Any = None

    def module(self, module: Any) -> None:
        """Watches a module; a compiled one is left alone."""
        if isinstance(module, LightningModule):
            hooks = _functions(ModelHooks, DataHooks, CheckpointHooks)
            self._subclass(module, [*hooks, *STEPS, *CONFIGURE, *OPTIMISATION], "module", LightningModule)

    def datamodule(self, data: LightningDataModule) -> None:
        """Watches a data module."""
        hooks = _functions(DataHooks, CheckpointHooks)
        self._subclass(data, [*hooks, "on_exception", "state_dict", "load_state_dict"], "data", LightningDataModule)

    def callback(self, name: str) -> Callback:
        """A callback that writes down every hook: "first" its name alone, "last" all there is to tell."""
        hooks = [hook for hook in _functions(Callback) if hook not in QUIET_CALLBACK_NAMES]
        make = self._full_hook if name == "last" else self._brief_hook
        return type("Watcher", (Callback,), {hook: make(name, hook) for hook in hooks})()

    def _brief_hook(self, who: str, hook: str) -> Callable[..., None]:
        return lambda callback, *args, **kwargs: self.lines.append(f"{who}.{hook}")

    def _full_hook(self, who: str, hook: str) -> Callable[..., None]:
        signature = inspect.signature(getattr(Callback, hook))

        def watcher(callback: Callback, *args: Any, **kwargs: Any) -> None:
            given = list(signature.bind(callback, *args, **kwargs).arguments.values())
            self.note(who, hook, given[3:], metrics=hook.endswith("_end"))

        return watcher

    def _subclass(self, target: Any, hooks: Iterable[str], who: str, base: type) -> None:
        cls = type(target)
        watched = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
        for hook in dict.fromkeys(hooks):
            original = getattr(cls, hook, None)
            if original is not None and (not _has_effect(hook) or original is not getattr(base, hook, None)):
                setattr(watched, hook, self._wrapper(original, who, hook))
        target.__class__ = watched

    def _wrapper(self, original: Callable[..., Any], who: str, hook: str) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def wrapper(target: Any, *args: Any, **kwargs: Any) -> Any:
            self.note(who, hook, list(signature.bind(target, *args, **kwargs).arguments.values())[1:])
            return original(target, *args, **kwargs)

        wrapper.__name__ = hook
        if hook in STEPS:
            wrapper.__wrapped__ = original  # both trainers read the arguments' names
        return wrapper

    def note(self, who: str, hook: str, arguments: Sequence[Any], metrics: bool = False) -> None:
        """Adds a line; whether arguments came by position or by name makes no difference."""
        given = "checkpoint" if hook in CHECKPOINT_HOOKS else ", ".join(map(describe, arguments))
        state = "" if hook.endswith("_dataloader") or hook == "configure_callbacks" else self._state()
        self.lines.append(f"{who}.{hook}({given}) {state}{self._metrics() if metrics else ''}")

    def _state(self) -> str:
        trainer = self.trainer
        if trainer is None:
            return "[no trainer yet]"
        modes = ("training", "sanity_checking", "validating", "testing", "predicting")
        mode = " ".join(name for name in modes if getattr(trainer, name))
        grad = "inference" if torch.is_inference_mode_enabled() else "grad" if torch.is_grad_enabled() else "no_grad"
        module = trainer.lightning_module
        training = module is not None and "".join("t" if part.training else "e" for part in module.modules())
        return (
            f"[{mode} {grad} step={trainer.global_step} epoch={trainer.current_epoch} modules={training}"
            f" last={trainer.is_last_batch} stop={trainer.should_stop}]"
        )

    def _metrics(self) -> str:
        kinds = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
        return "".join(f" {kind[:-8]}{describe(dict(getattr(self.trainer, kind)))}" for kind in kinds)


def describe(value: Any) -> str:
    """A short text that is equal for equal values: tensors by dtype, shape and a checksum of their bits."""
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if isinstance(value, Enum):
        return describe(value.value)
    if isinstance(value, LightningOptimizer):
        return f"<Lightning {type(value.optimizer).__name__}>"
    if type(value).__name__ in STAND_INS:
        return "<no optimizer>"
    if isinstance(value, (Optimizer, LRScheduler, nn.Module, BaseException)):
        return f"<{type(value).__name__}>"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(describe, value))})"
    if callable(value):
        return "<callable>"
    if isinstance(value, Iterator):
        return "<iterator>"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else f"<{type(value).__name__}>"


def _describe_tensor(tensor: Tensor) -> str:
    values = tensor.detach()
    kind = f"{str(tensor.dtype)[6:]}{list(tensor.shape)}{' grad' if tensor.requires_grad else ''}"
    if values.numel() <= 1:
        return f"{kind}={values.tolist()}"
    return f"{kind}#{zlib.crc32(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()):08x}"
