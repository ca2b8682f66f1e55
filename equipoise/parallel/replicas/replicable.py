"""Checks of a module that is to be copied to several devices."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from equipoise.errors import ConfigurationError
from equipoise.interop.torch.modules import has_gradient_hooks, is_compiled, parameters_of

__all__ = ["check_hooks", "check_replicable"]


def check_replicable(module: nn.Module, devices: Sequence[torch.device]) -> None:
    """Check that a module can be copied to devices.

    Args:
        module: The module.
        devices: The devices.

    Raises:
        ConfigurationError: If it cannot. The message names the obstacle and the way out.
    """
    has_several_devices = len(set(devices)) > 1
    for name, part in module.named_modules():
        path = type(module).__name__
        if name:
            path = f"{path}.{name}"
        _check_kind(part, path)
        if has_several_devices:
            _check_tensors(part, path)
    _check_one_device(module)


def _check_kind(module: nn.Module, path: str) -> None:
    """Refuse kinds of modules that cannot be copied."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigurationError(f"{path} is a TorchScript module, which cannot be copied to several devices.")
    if is_compiled(module):
        raise ConfigurationError(
            f"{path} is compiled, for one device; copies for several would share that code. Leave `torch.compile`"
            " out, or compile functions that the module calls."
        )
    for parameter in parameters_of(module).values():
        if parameter is not None and is_lazy(parameter):
            raise ConfigurationError(
                f"{path} is lazy: its parameters have no shape yet. Run a batch through it before training, for"
                " instance in `__init__`."
            )


def _check_tensors(module: nn.Module, path: str) -> None:
    """Refuse tensors in plain attributes, which copies on other devices would share."""
    for name, value in vars(module).items():
        # Tensors without dimensions may be used on all devices.
        if not isinstance(value, Tensor) or value.ndim == 0:
            continue
        if _is_recomputed(module, name):
            continue
        raise ConfigurationError(
            f"{path}.{name} is a tensor that stays on its device, but copies of the module on others share it."
            f" Register it: `self.register_buffer({name!r}, ...)`."
        )


def _is_recomputed(module: nn.Module, name: str) -> bool:
    """Return whether a tensor is a metric's, or computed by a hook before every forward."""
    if isinstance(module, Metric):
        return True
    parameters = parameters_of(module)
    # Pruning computes `weight` from `weight_orig`, weight norm from `weight_g` and `weight_v`.
    if f"{name}_orig" in parameters:
        return True
    return f"{name}_g" in parameters and f"{name}_v" in parameters


def _check_one_device(module: nn.Module) -> None:
    """Refuse a module whose parameters are on several devices."""
    examples: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        examples.setdefault(parameter.device, name)
    if len(examples) <= 1:
        return
    locations = [f"{name} on {device}" for device, name in examples.items()]
    raise ConfigurationError(
        f"The parameters of {type(module).__name__} lie on several devices:"
        f" {', '.join(locations)}. A module that is spread over"
        " devices by hand cannot be copied; train it with strategy='single_device'."
    )


def check_hooks(module: nn.Module) -> None:
    """Check that parameters have no hooks on their gradients, which would see the gradient of one part of a batch.

    Raises:
        ConfigurationError: If one has.
    """
    for name, parameter in module.named_parameters():
        if has_gradient_hooks(parameter):
            raise ConfigurationError(
                f"The parameter {name!r} has a hook, which would see the gradient of one part of the batch. Change"
                " gradients in `on_after_backward` or `on_before_optimizer_step`, where they are complete, or choose"
                " parallelize='forward'."
            )
