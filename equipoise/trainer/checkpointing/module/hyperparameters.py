"""Hyperparameters that hold networks of the module, as they were before the module was placed.

`save_hyperparameters()` keeps the arguments of `__init__`, networks among them. Their layers are changed with the
module: they are sharded, exchanged, or compute their activations again. Before that, the structure of such networks is
copied without their weights; a checkpoint fills it with the whole weights that it holds anyway, so that none is copied
or written twice.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["UnplacedHyperparameters", "hyperparameters_of"]


def hyperparameters_of(module: LightningModule) -> Mapping[str, Any]:
    """Return the hyperparameters of a module, which are not copied. A module without any gets no attribute by it."""
    attributes = vars(module)
    before = {*attributes}
    hyperparameters: Mapping[str, Any] = module.hparams
    for name in attributes.keys() - before:
        del attributes[name]
    return hyperparameters


class UnplacedHyperparameters:
    """The hyperparameters of a module before it is placed.

    Args:
        module: The module.
        hyperparameters: Its hyperparameters.

    Attributes:
        networks: The hyperparameters that hold weights of the module, without these weights.
    """

    def __init__(self, module: nn.Module, hyperparameters: Mapping[str, Any]) -> None:
        self._names: list[tuple[str, Tensor]] = []
        self.networks: dict[str, Any] = {}
        networks = {name: value for name, value in hyperparameters.items() if _holds_part(value, module)}
        if not networks:
            return
        # 1. Empty tensors in place of all weights.
        memo: dict[int, Any] = {}
        state = module.state_dict(keep_vars=True)
        for name, tensor in state.items():
            # A tied weight has several names. One without a shape has no values yet.
            is_known = id(tensor) in memo
            if not isinstance(tensor, Tensor) or is_known or is_lazy(tensor):
                continue
            empty = tensor.detach()
            empty = empty.to("meta")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty)
                empty.requires_grad_(tensor.requires_grad)
            memo[id(tensor)] = empty
            self._names.append((name, empty))
        # Buffers outside of the state stay: they are small, and no checkpoint holds them.
        for buffer in module.buffers():
            memo.setdefault(id(buffer), buffer)
        # 2. The structure.
        try:
            self.networks = deepcopy(networks, memo)
        except Exception:
            # Objects of the user may refuse to be copied in any way. They are written as they are, if that is possible.
            return

    def filled(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the hyperparameters that hold weights, with whole ones.

        Args:
            state: The state of the module, whose memory is shared.
        """
        memo: dict[int, Any] = {}
        for name, empty in self._names:
            if name not in state:
                continue
            tensor = state[name]
            if isinstance(empty, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=empty.requires_grad)
            memo[id(empty)] = tensor
        return deepcopy(self.networks, memo)


def _holds_part(value: Any, module: nn.Module) -> bool:
    """Return True if a value is, or contains, a network that has a tensor or submodule of a module."""
    if isinstance(value, nn.Module):
        return not set(module.modules()).isdisjoint(value.modules())
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    return any(_holds_part(item, module) for item in items)
