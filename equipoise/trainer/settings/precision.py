"""Precision, plugins, torch's flags, and where modules are created."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from threading import get_ident
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.arguments.plugins import PluginsInUse, read_precision, sort_plugins
from equipoise.parallel.communication.tensor_copies import give_memory
from equipoise.precision import Precision, make_precision
from equipoise.trainer.settings.arguments import check_flags
from equipoise.tree import map_leaves, tensors_in

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


def select_plugins(plugins: Any) -> PluginsInUse:
    """Return the plugins by what they are for, and complete a CheckpointIO that wraps another one.

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


def module_init_context(strategy: Any, precision: Precision, *, empty: bool) -> ExitStack:
    """Return a context in which torch creates tensors on the device of a strategy, in the dtype of a precision.

    A strategy that fills parameters without memory has a `device_of_empty_modules`.
    """
    stack = ExitStack()
    if empty:
        stack.enter_context(_WithoutInit())
        if getattr(strategy, "device_of_empty_modules", strategy.root_device).type == "meta":
            stack.enter_context(_ParametersOnMeta())
    stack.enter_context(precision.init_context())
    stack.enter_context(strategy.root_device)
    return stack


class _ParametersOnMeta(TorchFunctionMode):
    """A context in which new parameters of modules are on the meta device, and so are results that depend on them.

    No checkpoint has the values of all other tensors, so these stay on their device.
    """

    def __enter__(self) -> "_ParametersOnMeta":
        # Such a hook is called in all threads, but other threads are not within this context.
        self._thread = get_ident()
        self._hook = register_module_parameter_registration_hook(self._take_memory)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        try:
            return function(*arguments, **options)
        except RuntimeError:
            # Torch computes nothing with tensors of both devices, and refuses `weight.data = values`.
            are_on_meta = {tensor.is_meta for tensor in tensors_in((arguments, options))}
            if are_on_meta != {True, False} or _changes_values(function, arguments, options):
                raise
        arguments, options = map_leaves(_on_meta, (arguments, options))
        return function(*arguments, **options)

    def _take_memory(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Move a new parameter to the meta device."""
        if type(parameter) is not nn.Parameter or parameter.is_meta or get_ident() != self._thread:
            return
        # Torch exchanges no tensor that has views or weak references. Such a parameter keeps its memory.
        with suppress(RuntimeError):
            give_memory(parameter, parameter.to("meta"))


def _changes_values(function: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return True if a function may write to a tensor with values, which must not be done to a copy."""
    name = getattr(function, "__name__", "")
    is_in_place = name.endswith("_") or "out" in options
    return is_in_place and not (arguments and isinstance(arguments[0], Tensor) and arguments[0].is_meta)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    return value


class _WithoutInit(TorchFunctionMode):
    """A context in which the functions of `torch.nn.init` leave tensors as they are."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if getattr(function, "__module__", None) != "torch.nn.init":
            return function(*arguments, **options)
        return options["tensor"] if "tensor" in options else arguments[0]
