"""Checks before a run: module, data and arguments must fit together."""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.compile import from_compiled
from torch.utils.data import Dataset, IterableDataset

from equipoise.errors import ConfigurationError, ConfigurationRuntimeError, ConfigurationTypeError
from equipoise.interop.lightning.classes import is_a, is_overridden, takes_iterator
from equipoise.interop.remote.paths import to_path
from equipoise.notices import rank_zero_warn
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.data.loaders import Source
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.hooks.mistyped_names import warn_of_mistyped_hooks
from equipoise.trainer.hooks.signatures import check_hook_signatures
from equipoise.trainer.optimization.steps.step_extension import step_extensions
from equipoise.trainer.runtime.run_data import RunData
from equipoise.trainer.state.run_state import RunState

__all__ = ["as_module", "check_run", "data_of", "placing", "refuse_lost_reports", "warn_of_eval_mode"]

# Hooks of Lightning 1.x, and their successors.
_REMOVED = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}


class _Entry(NamedTuple):
    """Requirements of an entry point: the stage of its loaders, methods of the module, the steps that it may run."""

    stage: str
    needed: tuple[str, ...]
    steps: tuple[str, ...]


_ENTRIES = {
    TrainerFn.FITTING: _Entry("train", ("training_step", "configure_optimizers"), ("training_step", "validation_step")),
    TrainerFn.VALIDATING: _Entry("val", ("validation_step",), ("validation_step",)),
    TrainerFn.TESTING: _Entry("test", ("test_step",), ("test_step",)),
    TrainerFn.PREDICTING: _Entry("predict", (), ("predict_step",)),
}


def as_module(model: Any) -> LightningModule:
    """Return the LightningModule that the user has passed, without the wrapper of `torch.compile`.

    Raises:
        ConfigurationError: If it is none; also a TypeError, as in Lightning.
    """
    # 1. A module, with or without a wrapper.
    if is_a(model, LightningModule):
        try:
            next(model.children(), None)
        except AttributeError:
            raise ConfigurationTypeError(
                f"`{type(model).__name__}.__init__` does not call `super().__init__()`. Call it first."
            ) from None
        module: LightningModule = model
        return module
    if isinstance(model, torch.nn.Module) and hasattr(model, "dynamo_ctx"):
        return from_compiled(model)  # type: ignore[arg-type]

    # 2. Something else.
    if isinstance(model, type):
        raise ConfigurationTypeError(
            f"The Trainer takes a LightningModule, not a class: pass an object, `{model.__name__}(...)`."
        )
    import lightning

    way_out = "The module comes first, then its data: fit(module, loader)."
    if isinstance(model, torch.nn.Module):
        way_out = (
            "Derive a class from LightningModule that holds it, with the methods `training_step` and"
            " `configure_optimizers`."
        )
    raise ConfigurationTypeError(
        f"The Trainer takes a LightningModule (lightning {lightning.__version__}), not"
        f" {type(model).__module__}.{type(model).__name__}. {way_out}"
    )


def check_run(
    state: RunState, module: LightningModule, strategy: Strategy, hooks: Hooks, precision: Precision, data: RunData
) -> None:
    """Check that the module has the methods, and the data module the loaders, of an entry point.

    Raises:
        ConfigurationError: Naming the method that is missing or not allowed, and a remedy.
    """
    # 1. The module's hooks and steps.
    fn = state.status.fn or TrainerFn.FITTING
    _check_methods(module, fn)
    warn_of_mistyped_hooks(module, hooks.datamodule, state.callbacks)
    owners = [module, *state.callbacks, *filter(None, [hooks.datamodule])]
    check_hook_signatures(owners, fn)
    strategy.check_module(module, training=fn == TrainerFn.FITTING)

    # 2. The steps of the entry point.
    if fn == TrainerFn.FITTING:
        _check_fit(module, state.callbacks)
        for extension in step_extensions(state):
            extension.check_run(state, module, strategy, hooks, precision)
        if not module.automatic_optimization:
            _check_manual_optimization(state, module)
    for step in _ENTRIES[fn].steps:
        is_used = step != "validation_step" or fn != TrainerFn.FITTING or data.can_validate
        if is_used and takes_iterator(module, step):
            raise ConfigurationError(
                f"`{type(module).__name__}.{step}(dataloader_iter)` would pull its batches by itself, so that the"
                f" trainer could not divide, weigh and resume them. Write `{step}(self, batch, batch_idx)`. For several"
                " batches in a step let the loader collate them into one, or set `accumulate_grad_batches`; to have"
                " batches copied ahead, set `Trainer(prefetch=True)`."
            )

    # 3. Its data.
    stage = _ENTRIES[fn].stage
    source = data.sources[stage]
    if not source.is_defined():
        raise ConfigurationError(
            f"There is no {stage} loader: pass one, or a datamodule, or define `{source.method}` in"
            f" {type(source.owner).__name__}."
        )
    if fn == TrainerFn.FITTING:
        _warn_of_lost_validation(state, module, data.sources["val"])


def _check_methods(module: LightningModule, fn: TrainerFn) -> None:
    """Check that a module has the methods that an entry point calls, and none that no trainer calls."""
    name = type(module).__name__
    for old, new in _REMOVED.items():
        if callable(getattr(module, old, None)):
            raise ConfigurationError(f"`{name}.{old}` belongs to Lightning 1.x and would never be called. Use `{new}`.")
    predicts = is_overridden("predict_step", module) or is_overridden("forward", module)
    if fn == TrainerFn.PREDICTING and not predicts:
        raise ConfigurationError(
            f"`predict` calls `predict_step`, or `forward` by default, but {name} defines neither. Define one."
        )
    needed = _ENTRIES[fn].needed
    for method in needed:
        if not is_overridden(method, module):
            from equipoise.names.synonyms import meant_hooks, similar_step

            names = [other for other in dir(module) if method in (similar_step(other), *meant_hooks(other))]
            mistyped = [other for other in names if other != method and callable(getattr(module, other, None))]
            remedy = f"Rename `{mistyped[0]}`." if mistyped else "Define it."
            listed = " and ".join(f"`{each}`" for each in needed)
            raise ConfigurationError(f"`{fn.value}` needs {listed}, but {name} does not define `{method}`. {remedy}")


def _check_fit(module: LightningModule, callbacks: Iterable[Callback]) -> None:
    _check_arguments(f"{type(module).__name__}.training_step", module.training_step)
    for callback in callbacks:
        if is_a(callback, Checkpoint):
            _check_checkpoint_name(callback)


def _check_manual_optimization(state: RunState, module: LightningModule) -> None:
    """Check that no argument is passed whose effect a module that optimises by hand must have by itself."""
    if state.gradient_clip_val:
        argument = f"gradient_clip_val={state.gradient_clip_val}"
        instead = "call `self.clip_gradients(...)`"
    elif state.accumulate_grad_batches and state.accumulate_grad_batches != 1:
        argument = f"accumulate_grad_batches={state.accumulate_grad_batches}"
        instead = "step the optimisers after every so many batches"
    elif state.captures_steps:
        argument = "capture=True"
        instead = "capture functions with `torch.cuda.make_graphed_callables`"
    else:
        return
    raise ConfigurationError(
        f"{type(module).__name__} optimises by hand (automatic_optimization=False), so Trainer({argument}) has"
        f" no effect. Leave it out and {instead} in `training_step`."
    )


def _check_checkpoint_name(callback: Any) -> None:
    """Check that a callback writes its checkpoints inside its own folder, which is no mistaken URL."""
    folder = getattr(callback, "dirpath", None)
    if isinstance(folder, str | os.PathLike):
        to_path(folder)
    names = {
        "filename": getattr(callback, "filename", None),
        "CHECKPOINT_NAME_LAST": getattr(callback, "CHECKPOINT_NAME_LAST", None),
    }
    for attribute, name in names.items():
        if not isinstance(name, str):
            continue
        # As a rule, the names of metrics stand in braces.
        without_braces = re.sub("[{}]", "", name)
        folders = re.split(r"[/\\]", without_braces)
        if ".." in folders or os.path.isabs(name):
            raise ConfigurationError(
                f"{attribute} of a {type(callback).__name__} names a file inside its dirpath, but {name!r} leads out of"
                " it. Give the folder as dirpath."
            )


def _check_arguments(owner: str, step: Callable[..., Any]) -> None:
    signature = inspect.signature(step)
    if "optimizer_idx" in signature.parameters:
        raise ConfigurationError(
            f"`{owner}` takes `optimizer_idx`, but a training step is called once for all optimisers. To step them in"
            " turn, as for a GAN, leave it out, set `self.automatic_optimization = False`, and step them in"
            " `training_step`: `first, second = self.optimizers()`."
        )
    for arguments in ((None, 0), (None,)):
        with suppress(TypeError):
            signature.bind(*arguments)
            return
    raise ConfigurationError(
        f"`{owner}` is called with a batch and its index, but is defined as `{signature}`. Take `(self, batch,"
        " batch_idx)`."
    )


def data_of(loaders: Any, datamodule: Any, val_loaders: Any = None) -> tuple[Any, LightningDataModule | None]:
    """Return the loaders and the data module of a run, of which one is None.

    Args:
        loaders: The loaders that were passed; the user may pass a data module in their place.
        datamodule: The data module that was passed.
        val_loaders: The validation loaders that were passed to a fit. Default: None.

    Raises:
        ConfigurationError: If both were passed, or if the data module is none.
    """
    # 1. A dataset in place of a loader works, but is rarely meant.
    if isinstance(loaders, Dataset) and not isinstance(loaders, IterableDataset):
        rank_zero_warn(
            f"A dataset was passed in place of a loader ({type(loaders).__name__}), so each of its samples is taken"
            " for a batch. Pass `DataLoader(dataset, batch_size=...)`; if the samples are batches, `batch_size=None`."
        )

    # 2. A data module in place of the loaders.
    if is_a(loaders, LightningDataModule):
        if datamodule is not None:
            raise ConfigurationError("Two data modules were passed. Pass one.")
        datamodule = loaders
        loaders = None

    # 3. One of both.
    if datamodule is not None and not is_a(datamodule, LightningDataModule):
        raise ConfigurationError(f"datamodule must be an object of LightningDataModule, not {datamodule!r}.")
    if datamodule is not None and (loaders is not None or val_loaders is not None):
        raise ConfigurationError("Both loaders and a datamodule were passed. Pass one of them.")
    return loaders, datamodule


@contextmanager
def placing(module: LightningModule) -> Iterator[None]:
    """Say which parameter or buffer has no values, if the module cannot be placed for that reason.

    Raises:
        ConfigurationError: Naming the first of them; also a RuntimeError.
    """
    try:
        yield
    except NotImplementedError as error:
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if tensor.is_meta:
                raise ConfigurationRuntimeError(
                    f"{name!r} of {type(module).__name__} is on the meta device, so it has no values to train. Create"
                    " it on a real device, or initialise it after `module.to_empty(device=...)` in `configure_model`."
                ) from error
        raise


def _warn_of_lost_validation(state: RunState, module: LightningModule, source: Source) -> None:
    name = type(module).__name__
    has_loader = source.is_defined()
    has_step = is_overridden("validation_step", module)
    if has_loader and not has_step:
        rank_zero_warn(f"There is a validation loader, but {name} has no `validation_step`: it will not be validated.")
    elif has_step and not has_loader and state.limit_val_batches > 0:
        rank_zero_warn(f"{name} has a `validation_step`, but there is no validation loader: it will not be validated.")


def warn_of_eval_mode(module: LightningModule) -> None:
    """Warn of parts of a module that are in eval mode when training begins."""
    count = sum(not submodule.training for submodule in module.modules())
    if count:
        rank_zero_warn(f"Found {count} module(s) in eval mode at the start of training. Is that intended?")


def refuse_lost_reports(callbacks: Iterable[Any]) -> None:
    """Check the callbacks of a run in processes that the strategy starts.

    A callback runs in those processes. A trial of Ray Tune, and a worker of Ray Train, is the process that starts them:
    only that one can report, and Ray passes over the reports of others in silence.

    Raises:
        ConfigurationError: If a callback is of Ray, or has an attribute `reports_to_ray`.
    """
    for callback in callbacks:
        packages = {base.__module__.partition(".")[0] for base in type(callback).__mro__}
        if "ray" in packages or getattr(callback, "reports_to_ray", False):
            raise ConfigurationError(
                f"{type(callback).__name__} reports to Ray, but the strategy would start processes of its own, in which"
                " Ray takes no reports: all of them would be lost. Take devices=1 or a strategy that computes in one"
                " process, such as 'dp'; or start the workers by ray.train.torch.TorchTrainer, also inside of a trial."
            )
