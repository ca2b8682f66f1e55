"""Optimiser states of a dtype of their own, such as 8-bit codes: they keep it when they are loaded.

Torch converts loaded states to the dtype of their parameters. That would turn codes into numbers, and a state in
bfloat16 into one of twice the size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from equipoise.parallel.optimizer_parameters import optimizer_parameters

__all__ = ["restore_dtypes"]


def restore_dtypes(optimizer: Optimizer, state: Mapping[str, Any], saved_dtypes: Mapping[int, torch.dtype]) -> None:
    """Give loaded states the dtype in which they were saved, where it was not that of their parameter.

    Optimisers with a `load_state_dict` of their own are left alone.

    Args:
        optimizer: The optimiser, which has loaded the state.
        state: The saved state.
        saved_dtypes: The dtypes in which parameters were saved, by their identity.
    """
    if getattr(type(optimizer), "load_state_dict", None) is not Optimizer.load_state_dict:
        return
    # A saved group has the indices of its parameters in the place of the parameters.
    indices: list[int] = []
    for group in state["param_groups"]:
        indices.extend(group["params"])
    parameters = optimizer_parameters(optimizer)
    for index, parameter in zip(indices, parameters, strict=False):
        present = optimizer.state.get(parameter)
        saved = state["state"].get(index)
        if not isinstance(present, dict) or not isinstance(saved, Mapping):
            continue
        usual = saved_dtypes.get(id(parameter), parameter.dtype)
        for key, value in saved.items():
            loaded = present.get(key)
            if type(value) is not Tensor or type(loaded) is not Tensor:
                continue
            if value.dtype not in (usual, loaded.dtype):
                present[key] = value.to(loaded.device)
