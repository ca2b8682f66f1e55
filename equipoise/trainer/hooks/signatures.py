"""Check the signatures of hooks before the first of them is called."""

import inspect
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import base_of, is_a

__all__ = ["check_hook_signatures"]

# Hooks with other names. The stage is passed by its name.
_OTHERS = ("setup", "teardown", "optimizer_step")
# Beginnings of the names of hooks that some runs do not call.
_CALLED_IN = {
    "optimizer_": (TrainerFn.FITTING,),
    "on_fit_": (TrainerFn.FITTING,),
    "on_train_": (TrainerFn.FITTING,),
    "on_validation_": (TrainerFn.FITTING, TrainerFn.VALIDATING),
    "on_test_": (TrainerFn.TESTING,),
    "on_predict_": (TrainerFn.PREDICTING,),
}


def check_hook_signatures(owners: Iterable[Any], fn: TrainerFn | None) -> None:
    """Refuse a hook that cannot be called.

    Args:
        owners: The module, the callbacks and the data module of a run.
        fn: The kind of run. Hooks that it does not call are not checked.

    Raises:
        ConfigurationError: If a hook does not accept its arguments. The message names the hook, the arguments and the
            signature.
    """
    for owner in owners:
        kinds = (LightningModule, LightningDataModule, Callback)
        base = base_of(owner, next(kind for kind in kinds if kind is Callback or is_a(owner, kind)))
        for name in dir(base):
            documented = getattr(base, name)
            if (name.startswith("on_") or name in _OTHERS) and inspect.isfunction(documented) and _is_called(name, fn):
                _check(owner, name, documented)


def _is_called(name: str, fn: TrainerFn | None) -> bool:
    """Return True if a kind of run calls a hook."""
    return all(fn in kinds for beginning, kinds in _CALLED_IN.items() if name.startswith(beginning))


def _check(owner: Any, name: str, documented: Any) -> None:
    hook = getattr(owner, name, None)
    if hook is None or getattr(type(owner), name, None) is documented:
        return
    # 1. Read the documented arguments.
    without_self = list(inspect.signature(documented).parameters.values())[1:]
    positional = [parameter for parameter in without_self if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    required = [parameter for parameter in positional if parameter.default is parameter.empty]
    # 2. Read the signature of the hook, and of its decorator, which may pass on other arguments.
    try:
        signature = inspect.signature(hook)
        signature_of_wrapper = inspect.signature(hook, follow_wrapped=False)
    except (TypeError, ValueError):
        # Some callable objects have no readable signature.
        return
    # 3. Compare.
    stage = ["stage"] if name in ("setup", "teardown") else []
    for candidate in (signature, signature_of_wrapper):
        if any(_binds(candidate, len(group) - len(stage), stage) for group in (positional, required)):
            return
    names = [parameter.name for parameter in positional]
    arguments = ", ".join(names)
    raise ConfigurationError(
        f"`{type(owner).__name__}.{name}` is called with ({arguments}), but is defined as `{signature}`."
        f" Take `({', '.join(['self', *names])})`."
    )


def _binds(signature: inspect.Signature, count: int, names: Iterable[str]) -> bool:
    try:
        signature.bind(*range(count), **dict.fromkeys(names))
    except TypeError:
        return False
    return True
