"""Optimisers, in all forms that `configure_optimizers` may return them, with their learning-rate schedulers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from equipoise.errors import ConfigurationError
from equipoise.interop.torch.optimizers import has_step_pre_hooks, may_decide_by_loss
from equipoise.notices import rank_zero_warn
from equipoise.validation import describe_value

__all__ = ["NoOptimizer", "move_state", "parse_optimizers", "takes_no_closure"]

_FORMS = (
    "It may return an optimiser; a list or tuple of optimisers; two lists, ([optimiser], [scheduler]); a dictionary"
    " with the keys 'optimizer', 'lr_scheduler' and 'monitor', or a tuple of such dictionaries; or None for no"
    " optimiser."
)


class NoOptimizer(Optimizer):
    """Stand-in where `configure_optimizers` returned None: a step does nothing but run the closure."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def step(self, closure: Any = None) -> Any:
        """Run the closure, if there is one."""
        if closure is None:
            return None
        return closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return no state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return "No Optimizer"


def parse_optimizers(returned: Any, module: LightningModule) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Return the optimisers and scheduler configurations that `configure_optimizers` has returned in any form.

    Args:
        returned: The return value of the method.
        module: The user's module, which decides whether optimisation is automatic.

    Raises:
        ConfigurationError: If the value has none of the known forms, or contradicts itself.
    """
    # 1. Optimisers and schedulers, whatever the form.
    if returned is None:
        rank_zero_warn(
            "`configure_optimizers` returned None: this fit runs without an optimiser. If it makes one, it must return"
            " it."
        )
        returned = NoOptimizer()
    optimizers, schedulers = _parse_form(returned)

    # 2. The trainer steps all optimisers together. In manual optimisation they may be any.
    if module.automatic_optimization:
        if not optimizers:
            raise ConfigurationError(
                f"`configure_optimizers` returned {_describe(returned)}, without an optimiser. {_FORMS}"
            )
        if len(optimizers) > 1:
            from equipoise.trainer.optimization.configuration import several_optimizers

            several_optimizers.check_several(returned, optimizers, module)
            several_optimizers.warn_of_unstepped(optimizers, module)

    # 3. The configuration of each scheduler.
    if not schedulers:
        return optimizers, []
    from equipoise.trainer.optimization.configuration.scheduler_config import check_scheduler, scheduler_config

    configs = [scheduler_config(scheduler, module) for scheduler in schedulers]
    for config in configs:
        check_scheduler(config, optimizers, module)
    return optimizers, configs


def _is_optimizer(value: Any) -> bool:
    """Return True for an optimiser of torch, and for objects that behave like one."""
    if isinstance(value, Optimizer):
        return True
    return all(hasattr(value, name) for name in ("step", "state_dict", "param_groups"))


def _parse_form(returned: Any) -> tuple[list[Optimizer], list[Any]]:
    """Return optimisers, and schedulers or their dictionaries, from any of the known forms."""
    # One of them stands for a list.
    items = [returned] if _is_optimizer(returned) or isinstance(returned, Mapping) else returned
    if isinstance(items, Sequence) and not isinstance(items, str):
        if _is_two_lists(items):
            optimizers, schedulers = items
            if not isinstance(schedulers, (list, tuple)):
                schedulers = [schedulers]
            return list(optimizers), list(schedulers)
        if all(isinstance(item, Mapping) for item in items):
            return _parse_dictionaries(items)
        if all(map(_is_optimizer, items)):
            return list(items), []
    raise ConfigurationError(f"`configure_optimizers` returned {_describe(returned)}. {_FORMS}")


def _is_two_lists(returned: Sequence[Any]) -> bool:
    """Return True for a list of optimisers with a list of schedulers, or with one scheduler."""
    if len(returned) != 2 or not isinstance(returned[0], list):
        return False
    return all(map(_is_optimizer, returned[0]))


def _parse_dictionaries(dictionaries: Sequence[Mapping[str, Any]]) -> tuple[list[Optimizer], list[Any]]:
    """Return the optimisers of some dictionaries and the schedulers of those that have one."""
    optimizers: list[Optimizer] = []
    schedulers: list[Any] = []
    for dictionary in dictionaries:
        # 1. The optimiser.
        _check_dictionary(dictionary)
        optimizers.append(dictionary["optimizer"])

        # 2. The scheduler. A monitor beside it belongs to it.
        if "lr_scheduler" not in dictionary:
            continue
        scheduler = dictionary["lr_scheduler"]
        monitor = dictionary.get("monitor")
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler = {"scheduler": scheduler, "monitor": monitor}
        elif monitor is not None and isinstance(scheduler, Mapping):
            scheduler = {"monitor": monitor, **scheduler}
        schedulers.append(scheduler)
    return optimizers, schedulers


def _check_dictionary(dictionary: Mapping[str, Any]) -> None:
    """Check that a dictionary has an optimiser, and warn of other keys than the known ones."""
    if not _is_optimizer(dictionary.get("optimizer")):
        content = "no 'optimizer'"
        if "optimizer" in dictionary:
            content = f"under 'optimizer' is {describe_value(dictionary['optimizer'])}"
        raise ConfigurationError(f"`configure_optimizers` returned {_describe(dictionary)}, but {content}. {_FORMS}")
    extra = dictionary.keys() - {"optimizer", "lr_scheduler", "monitor"}
    if extra:
        known = "the keys are 'optimizer', 'lr_scheduler' and 'monitor'."
        text = f"Found unsupported keys in the optimizer configuration: {extra}; {known}"
        rank_zero_warn(text, category=RuntimeWarning)


def _describe(returned: Any) -> str:
    if isinstance(returned, Mapping):
        return f"a dictionary with the keys {list(returned)}"
    if not isinstance(returned, (list, tuple)):
        return describe_value(returned)
    container = type(returned).__name__
    if not returned:
        return f"an empty {container}"
    return f"a {container} of {', '.join(type(item).__name__ for item in returned)}"


def move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Move an optimiser's state to a device."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.to(device)


def takes_no_closure(optimizer: Optimizer) -> bool:
    """Return True if neither the optimiser nor a hook on it can tell that it was stepped without a closure."""
    return not may_decide_by_loss(optimizer) and not has_step_pre_hooks(optimizer)
