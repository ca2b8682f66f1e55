"""Check the signatures of hooks before the first of them is called."""

import inspect
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import base_of, is_a

__all__ = ["check_hook_signatures"]

# Beginnings of the names of hooks that some runs do not call.
_CALLED_IN = {
    "on_fit_": (TrainerFn.FITTING,),
    "on_train_": (TrainerFn.FITTING,),
    "on_validation_": (TrainerFn.FITTING, TrainerFn.VALIDATING),
    "on_test_": (TrainerFn.TESTING,),
    "on_predict_": (TrainerFn.PREDICTING,),
}


def check_hook_signatures(owners: Iterable[Any], fn: TrainerFn | None) -> None:
    """Refuse a hook that cannot be called.

    Args:
        owners: The module and the callbacks of a run.
        fn: The kind of run. Hooks that it does not call are not looked at.

    Raises:
        ConfigurationError: Naming the hook, what it is called with, and its signature.
    """
    for owner in owners:
        base = base_of(owner, LightningModule if is_a(owner, LightningModule) else Callback)
        for name in dir(base):
            documented = getattr(base, name)
            if name.startswith("on_") and inspect.isfunction(documented) and _is_called(name, fn):
                _check(owner, name, documented)


def _is_called(name: str, fn: TrainerFn | None) -> bool:
    return all(fn in kinds for beginning, kinds in _CALLED_IN.items() if name.startswith(beginning))


def _check(owner: Any, name: str, documented: Any) -> None:
    hook = getattr(owner, name, None)
    if hook is None or getattr(type(owner), name, None) is documented:
        return
    parameters = list(inspect.signature(documented).parameters.values())[1:]  # without self
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    try:
        signature = inspect.signature(hook)
        of_wrapper = inspect.signature(hook, follow_wrapped=False)  # a decorator may hand on other arguments
    except (TypeError, ValueError):  # of an object that does not show it
        return
    for each in (signature, of_wrapper):
        if _binds(each, len(positional)) or _binds(each, len(required)):
            return
    raise ConfigurationError(
        f"`{type(owner).__name__}.{name}` is called with ({', '.join(positional)}), but is defined as `{signature}`."
        f" Take `(self, {', '.join(positional)})`."
    )


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
