"""Precision, plugins, torch's flags, and where modules are created."""

import os
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch.overrides import TorchFunctionMode

from equipoise.errors import ConfigurationError
from equipoise.precision import Precision, make_precision
from equipoise.trainer.settings.arguments import check_flags

if TYPE_CHECKING:
    from equipoise.interop.lightning.arguments.plugins import PluginsInUse

__all__ = ["module_init_context", "select_plugins", "select_precision", "set_torch_flags"]


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


def select_plugins(plugins: Any) -> "PluginsInUse":
    """Return the plugins by what they are for, and complete a CheckpointIO that wraps another one.

    Raises:
        ConfigurationError: If one has no meaning here; the message names the argument that replaces it.
    """
    from equipoise.interop.lightning.arguments.plugins import sort_plugins

    in_use = sort_plugins(plugins)
    checkpoint_io = in_use.checkpoint_io
    # Some wrap another one; Lightning's trainer would set it.
    if getattr(checkpoint_io, "checkpoint_io", checkpoint_io) is None and checkpoint_io is not None:
        checkpoint_io.checkpoint_io = TorchCheckpointIO()
    return in_use


def select_precision(precision: Any, device_type: str) -> Precision:
    """Return the precision.

    Args:
        precision: A name, or one of Lightning's plugins. None: "32-true".
        device_type: The type of the devices, such as "cpu" or "cuda".

    Raises:
        ConfigurationError: If there is no such precision, or the devices cannot compute in it.
    """
    if precision is None:
        return make_precision(None, device_type)
    from equipoise.interop.lightning.arguments.plugins import read_precision

    chosen = read_precision(precision)
    if chosen.device_type not in (None, device_type):
        raise ConfigurationError(
            f"{type(precision).__name__}(device={chosen.device_type!r}) is a precision of other devices: this trainer's"
            f" are {device_type}. Take precision={chosen.name!r}, which is that of the devices in use."
        )
    return make_precision(chosen.name, device_type, chosen.scaler)


def module_init_context(strategy: Any, precision: Precision, *, empty: bool) -> ExitStack:
    """Return a context in which torch creates tensors on the device of a strategy, in the dtype of a precision.

    A strategy that fills parameters without memory has an `empty_module_context`.
    """
    stack = ExitStack()
    if empty:
        stack.enter_context(_WithoutInit())
        empty_module_context = getattr(strategy, "empty_module_context", nullcontext)
        stack.enter_context(empty_module_context())
    stack.enter_context(precision.init_context())
    stack.enter_context(strategy.root_device)
    return stack


class _WithoutInit(TorchFunctionMode):
    """A context in which the functions of `torch.nn.init` leave tensors as they are."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if getattr(function, "__module__", None) != "torch.nn.init":
            return function(*arguments, **options)
        return options["tensor"] if "tensor" in options else arguments[0]
