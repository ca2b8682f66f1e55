"""Everything private of Lightning, torchmetrics and torch that the trainer must touch, in one place.

Each name stands here with the reason why nothing public does; `tests/trainer/test_interop.py` notices when one of
them changes. What Lightning's own objects expect to find in a trainer is the other direction: `lightning_view.py`.
"""

import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from tempfile import TemporaryDirectory
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.fabric.utilities.init import _EmptyInit
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from equipoise.callbacks.lightning_classes import base_of, is_a

if TYPE_CHECKING:
    from equipoise.trainer.trainer import Trainer

__all__ = [
    "CURRENT_HOOK",
    "NO_CLOSURE",
    "LogOptions",
    "attach_profiler",
    "bind_log",
    "cannot_fire",
    "closure_not_called",
    "combine",
    "combined_mode",
    "continue_csv",
    "csv_writer",
    "empty_init",
    "forget_run",
    "has_step_hooks",
    "hyperparameters_name",
    "last_batch_value",
    "last_checkpoints",
    "load_metric_states",
    "load_saving_states",
    "log_hyperparams",
    "logging_levels",
    "looks_after_training_epochs",
    "metric_states",
    "pretend_device",
    "saving_states",
    "seed_workers",
    "set_csv_rewriting",
    "unbind_log",
    "unscales_by_itself",
    "wrap_optimizer",
]

# The module's attribute that says which hook is running: `LightningModule.log` reads it, and a setter would go
# through nn.Module (1 µs).
CURRENT_HOOK = "_current_fx_name"

# What LightningOptimizer.step() passes on when the user gave no closure; public, but known by identity only.
NO_CLOSURE = do_nothing_closure


# self.log


class LogOptions(NamedTuple):
    """The arguments of `self.log` that must be the same in every call for one name."""

    prog_bar: bool = False
    logger: bool | None = None
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: Any = "mean"
    sync_dist: bool = False
    add_dataloader_idx: bool = True
    rank_zero_only: bool = False


def _log(
    self: LightningModule,
    name: str,
    value: Any,
    prog_bar: bool = False,
    logger: bool | None = None,
    on_step: bool | None = None,
    on_epoch: bool | None = None,
    reduce_fx: Any = "mean",
    enable_graph: bool = False,
    sync_dist: bool = False,
    sync_dist_group: Any | None = None,
    add_dataloader_idx: bool = True,
    batch_size: int | None = None,
    metric_attribute: str | None = None,
    rank_zero_only: bool = False,
) -> None:
    # `_trainer` and `_current_fx_name` are read directly: the public property costs ten times as much.
    trainer: Any = self._trainer
    if trainer is None:
        LightningModule.log(self, name, value)  # a copy that outlived the run; the stock method warns
        return
    given = (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx, rank_zero_only)
    trainer.logs.add(self._current_fx_name, name, value, given, batch_size)


_log.__name__ = "log"  # so that the bound method is pickled and deep-copied as getattr(module, "log")


def bind_log(module: LightningModule, callbacks: Iterable[Callback]) -> None:
    """Gives the module our `log` for the length of a run, unless its class has one; Lightning's takes 340 µs a call.

    Args:
        module: The user's module.
        callbacks: They log through the module.
    """
    own = vars(module).get("log")
    if type(module).log is base_of(module, LightningModule).log and (own is None or _was_bound(own)):
        log = _log
        if (
            module._compiler_ctx is not None
        ):  # a compiled step must not trace into the logs; there is no public sign of it
            log = torch.compiler.disable(_log)  # type: ignore[no-untyped-call]
        vars(module)["log"] = MethodType(log, module)
    for callback in callbacks:
        vars(callback)["log"], vars(callback)["log_dict"] = module.log, module.log_dict


def _was_bound(log: Any) -> bool:
    """Whether it is what `bind_log` made, or what that becomes in a pickle: Lightning's own method, bound."""
    return isinstance(log, MethodType) and inspect.unwrap(log.__func__) in (_log, LightningModule.log)


def unbind_log(module: LightningModule, callbacks: Iterable[Callback]) -> None:
    """Takes back what `bind_log` did; a `log` that the user set on the instance stays."""
    if _was_bound(vars(module).get("log")):
        del vars(module)["log"]
    for callback in callbacks:
        vars(callback).pop("log", None)
        vars(callback).pop("log_dict", None)


def logging_levels(hook: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    """Whether a hook logs values of steps and of epochs; raises if it must not log. The table has no public name."""
    return _FxValidator.check_logging_and_get_default_levels(hook, on_step=on_step, on_epoch=on_epoch)


def last_batch_value(metric: Metric) -> Any:
    """What a metric computed for its last batch; `forward` returns it, but `self.log` receives the metric."""
    return metric._forward_cache


def metric_states(module: nn.Module) -> dict[str, Any]:
    """Copies of the states of all metrics; `state_dict` leaves them out unless they are persistent."""
    metrics = ((name, child) for name, child in module.named_modules() if isinstance(child, Metric))
    return {name: {"state": _copied(metric.metric_state), "count": metric.update_count} for name, metric in metrics}


def load_metric_states(module: nn.Module, states: dict[str, Any]) -> None:
    """Load the states of metrics onto the metrics' devices; the count of updates has no public setter."""
    children = dict(module.named_modules())
    for name, saved in states.items():
        metric = children.get(name)
        if isinstance(metric, Metric):
            # A checkpoint is read to the CPU, while the next update computes on the metric's device.
            for key, value in _copied(saved["state"], metric.device).items():
                setattr(metric, key, value)
            metric._update_count = saved["count"]
            metric._computed = None


def _copied(state: dict[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """Return copies, since metrics change their states in place.

    Args:
        state: Tensors and lists of tensors by name.
        device: Device of the copies. Default: where each tensor lies.
    """

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device or tensor.device, copy=True)

    return {
        key: [copy(item) for item in value] if isinstance(value, list) else copy(value) for key, value in state.items()
    }


# Callbacks and checkpoints


def cannot_fire(callback: Callback, hook: str) -> bool:
    """Whether a checkpoint callback's per-batch hook would do nothing, at 14 µs; only private names tell."""
    return (
        hook == "on_train_batch_end"
        and is_a(callback, ModelCheckpoint)
        and type(callback).on_train_batch_end is base_of(callback, ModelCheckpoint).on_train_batch_end
        and callback._every_n_train_steps < 1
        and callback._train_time_interval is None
    )


def looks_after_training_epochs(callback: Any) -> bool:
    """Return True if early stopping looks at the end of training epochs. By default it decides that in `setup`."""
    return bool(callback._check_on_train_epoch_end)


def last_checkpoints(callback: ModelCheckpoint, trainer: "Trainer") -> set[str]:
    """The files that a checkpoint callback calls its last, also those of an earlier process."""
    return callback._find_last_checkpoints(trainer)  # type: ignore[arg-type]


# What a ModelCheckpoint leaves out of its state: the step and the path of its last file, and whether it waits for the
# validation to save. Without them, a resumed run saves a step again within an accumulation window.
_SAVING = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")


def saving_states(
    callbacks: Iterable[Callback], writer: ModelCheckpoint | None, path: str | None, step: int
) -> dict[str, dict[str, Any]]:
    """What checkpoint callbacks know of their last files; their own states leave it out.

    Args:
        callbacks: The callbacks of the run.
        writer: The one that writes a file now. It notes the file only afterwards.
        path: That file.
        step: The present step.
    """
    states = {}
    for callback in callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        state = {name.lstrip("_"): getattr(callback, name) for name in _SAVING if hasattr(callback, name)}
        if callback is writer:
            state.update(last_global_step_saved=step, last_checkpoint_saved=path)
        states[callback.state_key] = {"dirpath": callback.dirpath, **state}
    return states


def load_saving_states(callbacks: Iterable[Callback], states: dict[str, dict[str, Any]]) -> None:
    """Takes back what `saving_states` returned, for callbacks that still write to the same folder.

    Args:
        callbacks: The callbacks of the run.
        states: The states, by the keys of the callbacks.
    """
    for callback in callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        state = states.get(callback.state_key)
        if state is None or state["dirpath"] != callback.dirpath:
            continue
        for name in _SAVING:
            if (key := name.lstrip("_")) in state:
                setattr(callback, name, state[key])


def log_hyperparams(trainer: "Trainer") -> None:
    """Hands hyperparameters and graph to the loggers; the merge of module and data module has no public name."""
    _log_hyperparams(trainer)  # type: ignore[arg-type]


def csv_writer(logger: Any) -> Any:
    """What writes the file of a CSV logger; None if it has not begun, or if the logger is another.

    The public property would make the writer, which deletes the file that is there.
    """
    is_stock = isinstance(logger, CSVLogger) and type(logger).experiment is CSVLogger.experiment
    return logger._experiment if is_stock else None


def continue_csv(logger: CSVLogger, columns: list[str]) -> None:
    """Lets a CSV logger append to the file in its folder; its writer would delete it, and knows no other way.

    Args:
        logger: The logger, which has not begun.
        columns: The columns of the file.
    """
    with TemporaryDirectory() as empty:
        writer = ExperimentWriter(empty)
    writer.log_dir = logger.log_dir
    writer.metrics_file_path = os.path.join(logger.log_dir, writer.NAME_METRICS_FILE)
    writer.metrics_keys = columns
    logger._experiment = writer


def set_csv_rewriting(writer: ExperimentWriter, rewrite: Callable[[list[str]], None]) -> None:
    """Lets the writer of a CSV logger take another function for its file, where columns have been added.

    Args:
        writer: The writer. One of a class of its own is left as it is.
        rewrite: Writes the file with these columns.
    """
    if type(writer) is ExperimentWriter:
        writer._rewrite_with_new_header = rewrite  # type: ignore[assignment]


def hyperparameters_name(owner: LightningModule | LightningDataModule) -> str | None:
    """The argument of `__init__` that is the hyperparameters as a whole; `load_from_checkpoint` asks for it."""
    name: str | None = getattr(owner, "_hparams_name", None)
    return name


# Modules and optimisers


def pretend_device(module: LightningModule, device: torch.device) -> None:
    """Lets `self.device` say in `setup` where the module will be; it has no setter."""
    for child in module.modules():
        if is_a(child, _DeviceDtypeModuleMixin):
            child._device = device


def forget_run(module: LightningModule) -> None:
    """Clears what a run leaves in a module: the hook that was running, and the names of its metrics."""
    module._current_fx_name = None
    module._metric_attributes = None


def wrap_optimizer(optimizer: Optimizer, strategy: Any) -> LightningOptimizer:
    """The optimiser that `self.optimizers()` returns; the class method that makes it is private, the class is not."""
    return LightningOptimizer._to_lightning_optimizer(optimizer, strategy)


def closure_not_called() -> Exception:
    """What Lightning raises, too, when `optimizer_step` did not run the closure."""
    return MisconfigurationException(
        "`optimizer_step` did not run its closure, which holds training_step, zero_grad and backward. Call"
        " `optimizer.step(closure=optimizer_closure)`"
        " or `optimizer_closure()` in it."
    )


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody registered a hook before the step, who would miss the closure; torch shows it nowhere else."""
    return bool(optimizer._optimizer_step_pre_hooks)


def unscales_by_itself(optimizer: Optimizer) -> bool:
    """Whether an optimiser unscales inside its step, as fused ones do; GradScaler asks the same attribute."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


# Loaders


def combine(loaders: Any, mode: Literal["max_size_cycle", "sequential"]) -> CombinedLoader:
    """A CombinedLoader of what the user gave; a warning of torch about Lightning's own code concerns nobody here."""
    if isinstance(loaders, CombinedLoader):
        return loaders
    if is_a(loaders, CombinedLoader):  # of the other package
        return CombinedLoader(loaders.iterables, loaders._mode)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        return CombinedLoader(loaders, mode)


def combined_mode(loader: CombinedLoader) -> str:
    """How a CombinedLoader reads its loaders; the constructor's argument is kept under a private name."""
    return loader._mode


def seed_workers(loader: Any, rank: int) -> None:
    """Seeds a loader's workers after `seed_everything(workers=True)`; what does it in Lightning is private."""
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(loader, "worker_init_fn", False) is None:
        init: Callable[[int], None] = partial(pl_worker_init_function, rank=rank)
        loader.worker_init_fn = init


def empty_init() -> AbstractContextManager[Any]:
    """A context in which modules are made without initialising their parameters; Lightning's has a private name."""
    return _EmptyInit()


def attach_profiler(profiler: Profiler, module: LightningModule) -> None:
    """Tells a profiler, weakly, which module it watches; the names of its files depend on it."""
    profiler._lightning_module = weakref.proxy(module)  # type: ignore[attr-defined]
