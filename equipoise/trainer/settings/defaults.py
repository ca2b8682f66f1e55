"""Strategy, loggers and plugins from names and defaults."""

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.overrides import TorchFunctionMode

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.arguments.plugins import PluginsInUse, read_precision, sort_plugins
from equipoise.interop.lightning.classes import is_a
from equipoise.parallel.communication.rank import Rank, find_rank
from equipoise.parallel.workers.availability import can_start_workers
from equipoise.precision import Precision, make_precision
from equipoise.strategies.by_name import make_strategy, strategy_names
from equipoise.strategies.single_device import SingleDeviceStrategy
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.settings.arguments import check_choice, check_count, check_flags
from equipoise.trainer.settings.devices import Devices, select_devices, select_num_nodes

__all__ = [
    "connect_strategy",
    "module_init_context",
    "root_directory",
    "select_loggers",
    "select_plugins",
    "select_precision",
    "select_strategy",
    "set_torch_flags",
]


# Strategy


def connect_strategy(strategy: Any, accelerator: Any, devices: Devices, num_nodes: int | None) -> tuple[Strategy, int]:
    """Choose strategy, devices and number of machines, from the arguments and the rank of this process.

    Args:
        strategy: A name, an object, or "auto".
        accelerator: "auto", "cpu", "gpu", "cuda" or "mps".
        devices: See `select_devices`.
        num_nodes: The number of machines; None if the user gave none.

    Returns:
        The strategy, connected to its devices, and the number of machines.
    """
    check_count("num_nodes", num_nodes, least=1, optional=True)
    rank = find_rank()
    available = select_devices(accelerator, devices, rank, num_nodes)
    machines = select_num_nodes(num_nodes, available, rank)
    choose_devices = devices == "auto"
    connected = select_strategy(strategy, available, machines, rank, choose_devices=choose_devices)
    return connected, machines


def select_strategy(
    strategy: Any,
    devices: Sequence[torch.device],
    num_nodes: int,
    rank: Rank | None = None,
    *,
    choose_devices: bool = False,
) -> Strategy:
    """Return a strategy that is connected to its devices.

    Args:
        strategy: A name, an object, or "auto": `single_device` for one device, `ddp` for several or if a launcher has
            started several processes, with measured shares if devices are unequal. Where no process can be started,
            `dp` or `balanced` for several.
        devices: The devices.
        num_nodes: The number of machines.
        rank: The rank that a launcher has given this process. Default: None, no launcher.
        choose_devices: Whether these are all available devices, of which the strategy may choose. Default: False.
    """
    connected: Strategy = strategy
    if not isinstance(strategy, Strategy):
        connected = _strategy_named(strategy, devices, rank)
    # A launcher has decided on the devices of its processes.
    if choose_devices and rank is None:
        devices = connected.default_devices(devices)
    connected.connect(devices, num_nodes)
    return connected


def _strategy_named(name: Any, devices: Sequence[torch.device], rank: Rank | None) -> Strategy:
    if isinstance(name, str) and name.lower() == "auto":
        return _default_strategy(devices, rank)
    # Most programs leave the choice to the trainer.
    from equipoise.trainer.settings.from_lightning.strategy_names import lightning_strategy, refuse_object

    if not isinstance(name, str):
        refuse_object(name)
    name = name.lower()
    # Names of Lightning's strategies mean one of these.
    names = strategy_names()
    if name not in names:
        counterpart = lightning_strategy(name)
        if counterpart is not None:
            name, options = counterpart
            return make_strategy(name, **options)
    if name in strategy_names(missing=True):
        return make_strategy(name)
    return make_strategy(check_choice("strategy", name, ["auto", *names]))


def _default_strategy(devices: Sequence[torch.device], rank: Rank | None) -> Strategy:
    """Return the strategy for "auto"."""
    knows_all_devices = True
    processes = 1
    if rank is not None:
        # A process knows the devices of its own machine only.
        processes = rank.world_size
        knows_all_devices = len(devices) == processes
    if len(devices) == 1 and processes == 1:
        return SingleDeviceStrategy()
    are_unequal = knows_all_devices and _are_unequal(devices)
    if rank is None and not can_start_workers():
        name = "balanced" if are_unequal else "dp"
        rank_zero_info(f'strategy="auto" is {name}, since this system cannot start processes for ddp.')
        return make_strategy(name)
    if are_unequal:
        return make_strategy("ddp", shares="auto")
    return make_strategy("ddp")


def _are_unequal(devices: Sequence[torch.device]) -> bool:
    """Return whether the devices are of several models."""
    names = (torch.cuda.get_device_name(device) if device.type == "cuda" else device.type for device in devices)
    return len(set(names)) > 1


# Loggers


def select_loggers(logger: bool | Logger | Iterable[Logger] | None, root_dir: str, *, dummy: bool) -> list[Logger]:
    """Return the loggers.

    Args:
        logger: A logger, several, True for the default (TensorBoard, or CSV if TensorBoard is not installed), or False
            for none.
        root_dir: The folder in which the default logger writes.
        dummy: Whether loggers write nothing, as under `fast_dev_run`.

    Raises:
        ConfigurationError: If one of them is no logger.
    """
    # False, None, or an empty list.
    if not logger:
        return []
    if dummy:
        return [DummyLogger()]
    if logger is True:
        return [_default_logger(root_dir)]
    loggers: list[Any] = [logger]
    is_single = isinstance(logger, str) or _looks_like_a_logger(logger)
    if isinstance(logger, Iterable) and not is_single:
        loggers = list(logger)
    for item in loggers:
        if not _looks_like_a_logger(item):
            raise ConfigurationError(
                "logger must be True, False, or one or several of Lightning's loggers, such as CSVLogger('logs'), or"
                f" objects with their methods ({', '.join(_LOGGER_METHODS)}), not {item!r}."
            )
        _check_attributes(item)
    return loggers


def _check_attributes(logger: Any) -> None:
    """Check that a logger names a place for checkpoints."""
    missing = [name for name in _LOGGER_ATTRIBUTES if not hasattr(logger, name)]
    if missing:
        raise ConfigurationError(
            f"The logger {type(logger).__name__} has no {', '.join(missing)}, which name the folder of checkpoints:"
            " derive it from lightning.pytorch.loggers.Logger, or give it these attributes (save_dir may be None)."
        )


def _default_logger(root_dir: str) -> Logger:
    try:
        return TensorBoardLogger(save_dir=root_dir)
    except ModuleNotFoundError:
        _report_missing_tensorboard()
        return CSVLogger(save_dir=root_dir)


# Once in a program, however many trainers it makes.
@cache
def _report_missing_tensorboard() -> None:
    rank_zero_info(
        "TensorBoard is not installed: metrics are written as CSV. For TensorBoard: pip install"
        " 'equipoise[tensorboard]'."
    )


_LOGGER_METHODS = ("log_metrics", "log_hyperparams", "save", "finalize")
_LOGGER_ATTRIBUTES = ("save_dir", "name", "version")


def _looks_like_a_logger(candidate: Any) -> bool:
    """Return whether a run can call an object of any class as a logger."""
    # A class has the methods, but cannot be called without an object.
    if isinstance(candidate, type):
        return False
    if is_a(candidate, Logger):
        return True
    return all(callable(getattr(candidate, name, None)) for name in _LOGGER_METHODS)


# Files, flags, plugins


def root_directory(path: Any) -> str:
    """Return the default folder of files: the path, or the working folder for None."""
    if path is None:
        return os.getcwd()
    if not isinstance(path, str | os.PathLike):
        raise ConfigurationError(f"default_root_dir must be a path, not {path!r}.")
    return os.fspath(path)


def set_torch_flags(deterministic: bool | str | None, benchmark: bool | None) -> None:
    """Set torch's flags for reproducible algorithms and for cuDNN's search of the fastest.

    Args:
        deterministic: True: only deterministic algorithms. "warn": a warning for each other algorithm. None: leave the
            flag unchanged.
        benchmark: Whether cuDNN searches. None: off if algorithms must be deterministic, else unchanged.

    Raises:
        ConfigurationError: If a value is something else.
    """
    if deterministic not in (None, True, False, "warn"):
        raise ConfigurationError(f"deterministic must be True, False, 'warn' or None, not {deterministic!r}.")
    check_flags(benchmark=benchmark)
    # The search may choose another algorithm in each run.
    if benchmark is None and deterministic:
        benchmark = False
    if benchmark is not None:
        torch.backends.cudnn.benchmark = bool(benchmark)
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if deterministic:
        # cuBLAS is deterministic with a fixed workspace only.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def select_plugins(plugins: Any) -> PluginsInUse:
    """Return the plugins by what they are for, and complete a CheckpointIO that wraps another one.

    Args:
        plugins: One, several, or None.

    Raises:
        ConfigurationError: If one has no meaning here; the message names the argument that replaces it.
    """
    in_use = sort_plugins(plugins)
    checkpoint_io = in_use.checkpoint_io
    # Some wrap another one; Lightning's trainer would set it.
    if getattr(checkpoint_io, "checkpoint_io", checkpoint_io) is None and checkpoint_io is not None:
        checkpoint_io.checkpoint_io = TorchCheckpointIO()
    return in_use


def select_precision(precision: Any, device_type: str) -> Precision:
    """Return the precision.

    Args:
        precision: A name, or one of Lightning's plugins.
        device_type: The type of the devices, such as "cpu" or "cuda".

    Raises:
        ConfigurationError: If there is no such precision, or the devices cannot compute in it.
    """
    chosen = read_precision(precision)
    if chosen.device_type not in (None, device_type):
        raise ConfigurationError(
            f"{type(precision).__name__}(device={chosen.device_type!r}) is a precision of other devices: this trainer's"
            f" are {device_type}. Take precision={chosen.name!r}, which is that of the devices in use."
        )
    return make_precision(chosen.name, device_type, chosen.scaler)


def module_init_context(device: torch.device, precision: Precision, *, empty: bool) -> ExitStack:
    """Return a context in which torch creates tensors on a device, in the dtype of a precision.

    Args:
        device: The device.
        precision: The precision.
        empty: Whether tensors stay uninitialised.
    """
    stack = ExitStack()
    stack.enter_context(precision.init_context())
    stack.enter_context(device)
    if empty:
        stack.enter_context(_WithoutInit())
    return stack


class _WithoutInit(TorchFunctionMode):
    """A context in which the functions of `torch.nn.init` leave tensors as they are."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if getattr(function, "__module__", None) != "torch.nn.init":
            return function(*arguments, **options)
        return options["tensor"] if "tensor" in options else arguments[0]
