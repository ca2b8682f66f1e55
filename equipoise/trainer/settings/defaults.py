"""Strategy, loggers and default callbacks from names and defaults."""

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    Checkpoint,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    Timer,
)
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.callbacks.progress.progress_bar import ProgressBar
from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.lightning.modules import empty_init
from equipoise.parallel.communication.rank import Rank, find_rank
from equipoise.precision import Precision
from equipoise.strategies.ddp.strategy import DDPStrategy
from equipoise.strategies.pipeline import PipelineStrategy
from equipoise.strategies.replicated.balanced import BalancedDataParallelStrategy
from equipoise.strategies.replicated.data_parallel import DataParallelStrategy
from equipoise.strategies.single_device import SingleDeviceStrategy
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import overrides, state_key_of
from equipoise.trainer.settings.arguments import Duration, check_choice, check_count, check_flags, seconds_of
from equipoise.trainer.settings.devices import Devices, select_devices, select_num_nodes
from equipoise.trainer.settings.refused_callbacks import refuse_finder
from equipoise.trainer.settings.strategy_names import lightning_strategy, refuse_object

__all__ = [
    "connect_strategy",
    "merge_callbacks",
    "module_init_context",
    "root_directory",
    "select_callbacks",
    "select_checkpoint_io",
    "select_loggers",
    "select_strategy",
    "set_torch_flags",
]

_STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        SingleDeviceStrategy,
        DataParallelStrategy,
        BalancedDataParallelStrategy,
        DDPStrategy,
        PipelineStrategy,
    )
}


# Strategy


def connect_strategy(
    strategy: str | Strategy, accelerator: Any, devices: Devices, num_nodes: int | None
) -> tuple[Strategy, int]:
    """Choose strategy, devices and number of machines from what the user says and from where this process stands.

    Args:
        strategy: A name, an object, or "auto".
        accelerator: "auto", "cpu", "gpu", "cuda" or "mps".
        devices: See `select_devices`.
        num_nodes: The number of machines; None if nothing was said.

    Returns:
        The strategy, connected to its devices, and the number of machines.
    """
    check_count("num_nodes", num_nodes, least=1, optional=True)
    place = find_rank()
    available = select_devices(accelerator, devices, place, num_nodes)
    machines = select_num_nodes(num_nodes, available, place)
    connected = select_strategy(strategy, available, machines, place, choose_devices=devices == "auto")
    return connected, machines


def select_strategy(
    strategy: str | Strategy,
    devices: Sequence[torch.device],
    num_nodes: int,
    place: Rank | None = None,
    *,
    choose_devices: bool = False,
) -> Strategy:
    """The strategy of a name, or the one that was given, connected to its devices.

    Args:
        strategy: A name, an object, or "auto": `single_device` for one device, `ddp` for several or where others have
            started several processes, with measured shares where devices are unequal.
        devices: The devices.
        num_nodes: The number of machines.
        place: Where this process stands. Default: None, nobody has started it among others.
        choose_devices: Whether these are all that there are, of which the strategy may choose. Default: False.
    """
    if not isinstance(strategy, Strategy):
        strategy = _strategy_named(strategy, devices, place)
    if choose_devices and place is None:
        devices = strategy.default_devices(devices)
    strategy.connect(devices, num_nodes)
    return strategy


def _strategy_named(name: Any, devices: Sequence[torch.device], place: Rank | None) -> Strategy:
    if not isinstance(name, str):
        refuse_object(name)
    if name == "auto":
        return _strategy_for(devices, place)
    found = None if name in _STRATEGIES else lightning_strategy(name)
    if found is not None:
        ours, options = found
        return _STRATEGIES[ours](**options)
    return _STRATEGIES[check_choice("strategy", name, ["auto", *_STRATEGIES])]()


def _strategy_for(devices: Sequence[torch.device], place: Rank | None) -> Strategy:
    """Return what "auto" stands for."""
    processes = 1 if place is None else place.world_size
    if len(devices) == 1 and processes == 1:
        return SingleDeviceStrategy()
    here_alone = place is None or len(devices) == processes  # else a process does not know the devices of all others
    return DDPStrategy(shares="auto" if here_alone and _are_unequal(devices) else None)


def _are_unequal(devices: Sequence[torch.device]) -> bool:
    """Whether there are devices of several models."""
    names = {torch.cuda.get_device_name(device) if device.type == "cuda" else device.type for device in devices}
    return len(names) > 1


# Loggers


def select_loggers(logger: bool | Logger | Iterable[Logger] | None, root_dir: str, *, dummy: bool) -> list[Logger]:
    """The loggers: TensorBoard by default, CSV where it is not installed.

    Args:
        logger: A logger, several, True for the default or False for none.
        root_dir: Where the default one writes.
        dummy: Whether nothing is to be written (`fast_dev_run`).
    """
    if not logger:
        return []
    if dummy:
        return [DummyLogger()]
    if logger is True:
        try:
            return [TensorBoardLogger(save_dir=root_dir)]
        except ModuleNotFoundError:
            rank_zero_info(
                "TensorBoard is not installed: metrics are written as CSV. For TensorBoard: pip install"
                " 'equipoise[tensorboard]'."
            )
            return [CSVLogger(save_dir=root_dir)]
    single = isinstance(logger, str) or _looks_like_a_logger(logger) or not isinstance(logger, Iterable)
    loggers: list[Any] = [logger] if single else list(logger)  # type: ignore[arg-type]
    for each in loggers:
        if not _looks_like_a_logger(each):
            raise ConfigurationError(
                "logger must be True, False, or one or several of Lightning's loggers, such as CSVLogger('logs'), or"
                f" objects with their methods ({', '.join(_LOGGER_METHODS)}), not {each!r}."
            )
    return loggers


_LOGGER_METHODS = ("log_metrics", "log_hyperparams", "save", "finalize")


def _looks_like_a_logger(candidate: Any) -> bool:
    """Return whether a run can call the candidate as a logger, of whatever class it is."""
    if isinstance(candidate, type):
        return False
    return is_a(candidate, Logger) or all(callable(getattr(candidate, name, None)) for name in _LOGGER_METHODS)


# Callbacks


def select_callbacks(
    callbacks: list[Callback] | Callback | None,
    *,
    enable_checkpointing: bool,
    enable_progress_bar: bool,
    enable_model_summary: bool,
    max_time: Duration | None,
    barebones: bool = False,
) -> list[Callback]:
    """The user's callbacks and the default ones, in the order in which they fire.

    Raises:
        ConfigurationError: If one contradicts an argument, or cannot run here.
    """
    several = callbacks is not None and isinstance(callbacks, Iterable) and not isinstance(callbacks, str)
    chosen: list[Callback] = [] if callbacks is None else list(callbacks) if several else [callbacks]  # type: ignore
    for callback in chosen:
        _check_callback(callback)
    cause = "barebones=True sets {}=False, which" if barebones else "{}=False"
    why = cause.format("enable_checkpointing")
    chosen += _default(chosen, Checkpoint, ModelCheckpoint, why, enable_checkpointing)
    if max_time is not None:
        seconds_of("max_time", max_time)
        if any(is_a(callback, Timer) for callback in chosen):
            rank_zero_info("max_time is left aside: there is a Timer among the callbacks.")
        else:
            chosen.append(Timer(duration=max_time))
    bars = [type(callback).__name__ for callback in chosen if is_a(callback, LightningProgressBar)]
    if len(bars) > 1:
        raise ConfigurationError(
            f"There can be one progress bar, but callbacks hold {len(bars)}: {', '.join(bars)}. Keep one of them."
        )
    # The bar is first, so that what others print at the end stands below its last line.
    why = cause.format("enable_progress_bar")
    chosen = _default(chosen, LightningProgressBar, ProgressBar, why, enable_progress_bar) + chosen
    if enable_model_summary and not any(is_a(callback, ModelSummary) for callback in chosen):
        chosen.append(RichModelSummary())
    _check_state_keys(chosen)
    return _order(chosen)


_NOT_NEEDED = ("state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint")  # without a state
_HOOKS = [
    name
    for name, value in vars(Callback).items()
    if callable(value) and not name.startswith("_") and name not in _NOT_NEEDED
]


def _check_callback(callback: Any) -> None:
    """Check that a run can call a callback: it is a Callback, or has all hooks of one, as a mock has.

    Raises:
        ConfigurationError: If it is neither, or cannot run here.
    """
    if isinstance(callback, type):
        raise ConfigurationError(
            f"callbacks holds the class {callback.__name__}. Pass an object: {callback.__name__}(...)."
        )
    if not is_a(callback, Callback) and not all(callable(getattr(callback, name, None)) for name in _HOOKS):
        raise ConfigurationError(
            f"callbacks must be a Callback of Equipoise or Lightning, or a list of them, but it holds {callback!r} of"
            f" type {type(callback).__name__}."
        )
    refuse_finder(callback)


def _default(chosen: list[Callback], kind: type, default: type[Callback], why: str, enabled: bool) -> list[Callback]:
    """Return the default callback of a kind, unless there is one or none is wanted.

    Args:
        chosen: The user's callbacks.
        kind: The kind.
        default: The class of the default one.
        why: The beginning of the message where the user's callbacks contradict `enabled`.
        enabled: Whether there is to be one of that kind.
    """
    present = [callback for callback in chosen if is_a(callback, kind)]
    if present and not enabled:
        raise ConfigurationError(
            f"{why} contradicts {type(present[0]).__name__} among the callbacks. Leave one of them out."
        )
    return [default()] if enabled and not present else []


def _check_state_keys(callbacks: list[Callback]) -> None:
    """Checks that a checkpoint can tell callbacks apart."""
    keys = [state_key_of(callback) for callback in callbacks if overrides(callback, "state_dict", Callback)]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigurationError(
                f"Two callbacks would save their state under the same key {key!r}. Give them different arguments,"
                " or a `state_key`."
            )


def _order(callbacks: list[Callback]) -> list[Callback]:
    """Checkpoint callbacks come last, to save what the others left."""
    return sorted(callbacks, key=lambda callback: is_a(callback, Checkpoint))


def root_directory(path: Any) -> str:
    """Where files go by default."""
    if path is not None and not isinstance(path, str | os.PathLike):
        raise ConfigurationError(f"default_root_dir must be a path, not {path!r}.")
    return os.fspath(path) if path is not None else os.getcwd()


def merge_callbacks(callbacks: list[Callback], of_module: list[Callback]) -> list[Callback]:
    """The trainer's callbacks and those of `configure_callbacks`, which replace ones of their own class.

    Args:
        callbacks: The trainer's.
        of_module: What the module's `configure_callbacks` returned.
    """
    if not of_module:
        return callbacks
    for callback in of_module:
        _check_callback(callback)
    replaced = tuple(
        kind
        for kind in {type(callback) for callback in callbacks} - {Callback}
        if any(issubclass(type(new), kind) for new in of_module)
    )
    return _order([callback for callback in callbacks if type(callback) not in replaced] + of_module)


def set_torch_flags(deterministic: bool | str | None, benchmark: bool | None) -> None:
    """Sets torch's flags for reproducible algorithms and for cuDNN's search of the fastest.

    Args:
        deterministic: True: only deterministic algorithms. "warn": where there are any. None: leave it as it is.
        benchmark: Whether cuDNN searches. None: no, where algorithms must be deterministic, else leave it as it is.
    """
    if deterministic not in (None, True, False, "warn"):
        raise ConfigurationError(f"deterministic must be True, False, 'warn' or None, not {deterministic!r}.")
    check_flags(benchmark=benchmark)
    if benchmark is None and deterministic:
        benchmark = False
    if benchmark is not None:
        torch.backends.cudnn.benchmark = bool(benchmark)
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS is deterministic with a fixed workspace only


def select_checkpoint_io(plugins: Any) -> CheckpointIO | None:
    """The CheckpointIO among the plugins; others belong elsewhere.

    Raises:
        ConfigurationError: Naming the argument that takes the place of a plugin.
    """
    given = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins] if plugins is not None else []
    found = None
    for plugin in given:
        if not is_a(plugin, CheckpointIO):
            raise ConfigurationError(
                f"plugins takes a CheckpointIO of Lightning, not {type(plugin).__name__}. For precisions there is"
                " precision=..., for processes"
                " strategy=..."
            )
        if found is not None:
            raise ConfigurationError("plugins holds two CheckpointIOs, of which one can be used.")
        if getattr(plugin, "checkpoint_io", plugin) is None:  # it wraps another, by default Lightning's own
            plugin.checkpoint_io = TorchCheckpointIO()
        found = plugin
    return found


def module_init_context(device: torch.device, precision: Precision, *, empty: bool) -> ExitStack:
    """A context in which tensors are made on a device, in a precision's dtype, and left uninitialised if `empty`."""
    stack = ExitStack()
    stack.enter_context(precision.init_context())
    stack.enter_context(device)
    if empty:
        stack.enter_context(empty_init())
    return stack
