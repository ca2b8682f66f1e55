"""Several optimisers in automatic optimisation: each parameter belongs to one of them."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationRuntimeError
from equipoise.notices import rank_zero_warn
from equipoise.parallel.optimizer_parameters import optimizer_parameters

__all__ = ["check_disjoint", "check_several", "warn_of_unstepped"]

_BY_HAND = (
    "To step them in turn, as for a GAN, set `self.automatic_optimization = False` and step them in `training_step`:"
    " `first, second = self.optimizers()`."
)
# Number of parameters that a message names.
_MOST_NAMES = 4


def check_several(returned: Sequence[Any], optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Check that one backward and one step of each optimiser is what the user means.

    Raises:
        ConfigurationRuntimeError: If it cannot be.
    """
    # 1. Optimisers that are stepped in turn.
    if any(isinstance(item, Mapping) and "frequency" in item for item in returned):
        raise ConfigurationRuntimeError(
            f"Automatic optimisation steps all {len(optimizers)} optimisers in every step, but a dictionary that"
            f" `configure_optimizers` returned has the key 'frequency'. {_BY_HAND}"
        )

    # 2. Optimisers that compute the gradients of all parameters again.
    for optimizer in optimizers:
        if _needs_closure(optimizer):
            raise ConfigurationRuntimeError(
                f"{type(optimizer).__name__} computes a batch several times in a step, so it cannot be one of several"
                f" optimisers, which share their gradients. Take it alone, or another one. {_BY_HAND}"
            )
    check_disjoint(optimizers, module)


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return True if an optimiser cannot step without a function that computes the gradients, as LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_disjoint(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Check that no parameter belongs to two optimisers.

    Raises:
        ConfigurationRuntimeError: If one does.
    """
    owners: dict[int, int] = {}
    shared: dict[tuple[int, int], list[nn.Parameter]] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in optimizer_parameters(optimizer):
            owner = owners.setdefault(id(parameter), number)
            if owner != number:
                shared.setdefault((owner, number), []).append(parameter)
    if not shared:
        return
    (first, second), parameters = next(iter(shared.items()))
    kinds = [f"{type(optimizers[number]).__name__} (optimiser {number})" for number in (first, second)]
    raise ConfigurationRuntimeError(
        f"Automatic optimisation steps all optimisers in every step, but {_names(parameters, module)} would be stepped"
        f" by two of them: {kinds[0]} and {kinds[1]}. Give each parameter to one. {_BY_HAND}"
    )


def warn_of_unstepped(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Warn of trainable parameters that no optimiser steps: a choice among several easily leaves some out."""
    stepped = {id(parameter) for optimizer in optimizers for parameter in optimizer_parameters(optimizer)}
    left_out = [p for p in module.parameters() if p.requires_grad and id(p) not in stepped]
    if left_out:
        rank_zero_warn(
            f"No optimiser that `configure_optimizers` returned steps {_names(left_out, module)}. If they are not to be"
            " trained, set their `requires_grad` to False."
        )


def _names(parameters: Sequence[nn.Parameter], module: nn.Module) -> str:
    """Return the names of parameters; the shape of one that is not in the module."""
    names_by_id = {id(parameter): name for name, parameter in module.named_parameters()}
    names = [
        names_by_id.get(id(parameter), f"a parameter of the shape {tuple(parameter.shape)} outside the module")
        for parameter in parameters
    ]
    more = len(names) - _MOST_NAMES
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown
