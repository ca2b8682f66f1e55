"""Results of a run in another process, applied to the user's objects in this one.

The main process collects, and the caller's process applies. Objects that both have stand for one another: where the
module of the main process refers to a callback, the caller's module refers to the caller's callback afterwards. What
cannot be sent, such as an open file, stays as it was.
"""

import os
import socket
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from equipoise.errors import WorkerError
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.torch.modules import STRUCTURE
from equipoise.parallel.communication.tensor_copies import give_memory
from equipoise.parallel.payload.object_pickling import can_be_packed
from equipoise.parallel.snapshot import random_state
from equipoise.trainer.logging.entry import on_cpu
from equipoise.trainer.runtime.request import Request
from equipoise.trainer.state.sent_state import SentState
from equipoise.trainer.surface.parts import TrainerParts

__all__ = ["ProcessResults", "apply_results", "collect", "shared_objects", "this_process"]

# Names and values of the attributes of an object.
Attributes = dict[str, Any]


def this_process() -> tuple[str, int]:
    """Return the machine and the number on it: processes of several machines may have the same number."""
    return socket.gethostname(), os.getpid()


@dataclass
class ProcessResults:
    """The results of a run in one process.

    Attributes:
        result: The value that the loop returned.
        process: The process; see `this_process`.
        tensors: The values of the module's parameters and buffers that the caller has as well.
        attributes: Those of each shared object, in order; None for an object without results.
        metrics: The content of the trainer's dictionaries of metrics.
        random: The states of the random generators.
        strategy: The state of the strategy.
        precision: The state of the scaler of the loss, if there is one.
        module_state: The module's whole state, where layers that it created in the run cannot be sent.
    """

    result: Any
    process: tuple[str, int] = field(default_factory=this_process)
    tensors: list[Tensor] = field(default_factory=list)
    attributes: list[Attributes | None] = field(default_factory=list)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    random: random_state.RandomState | None = None
    strategy: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)
    module_state: dict[str, Any] | None = None


def shared_objects(parts: TrainerParts, request: Request) -> list[Any]:
    """Return all objects of the trainer and the user that a run may change, in the same order in all processes."""
    module = request.module
    state = parts.state
    # 1. List them. The module precedes its submodules.
    objects = [
        parts.trainer,
        parts,
        state,
        *parts.states_of_loops,
        module,
        *module.modules(),
        request.datamodule,
        *state.callbacks,
        *state.loggers,
        parts.strategy,
        parts.precision,
        state.profiler,
        *module.parameters(),
        *module.buffers(),
    ]
    # 2. Take each once.
    by_identity = {id(item): item for item in objects if item is not None}
    return list(by_identity.values())


# In the main process


def collect(parts: TrainerParts, shared: list[Any], result: Any) -> ProcessResults:
    """Return the results of a run: the changes of the shared objects of this process."""
    # 1. The values of tensors, and the attributes of the other objects.
    attributes: list[Attributes | None] = []
    tensors = []
    for item in shared:
        if isinstance(item, Tensor):
            tensors.append(item.detach().cpu())
            attributes.append(None)
        else:
            attributes.append(_sendable(_results_of(parts, item), shared))

    # 2. Everything else.
    return ProcessResults(
        result,
        tensors=tensors,
        attributes=attributes,
        metrics=parts.logs.shown(),
        random=random_state.capture(),
        strategy=parts.strategy.portable.strategy_state(),
        precision=parts.precision.state_dict(),
        module_state=_state_of_incomplete_module(shared, attributes),
    )


def _results_of(parts: TrainerParts, item: Any) -> Attributes:
    # These send their results in other fields of `ProcessResults`, or have none.
    without_attributes = (
        parts.trainer,
        parts,
        parts.strategy,
        parts.precision,
        parts.state.profiler,
    )
    if any(item is other for other in without_attributes):
        return {}
    if isinstance(item, SentState):
        return item.results()
    attributes: Attributes = getattr(item, "__dict__", {})
    if is_a(item, Callback):
        return _as_in_a_copy(item, attributes)
    return attributes


def _as_in_a_copy(callback: Any, attributes: Attributes) -> Attributes:
    """Return the attributes of a callback, with the values that its own `__getstate__` gives to copies of it.

    Lightning's bar replaces the bars on the terminal in this way: they can be pickled, but not be read again.
    """
    state: Any = getattr(callback, "__getstate__", dict)()
    if not isinstance(state, dict) or hasattr(callback, "__setstate__"):
        return attributes
    return {name: state.get(name, value) for name, value in attributes.items()}


def _sendable(attributes: Attributes, shared: list[Any]) -> Attributes:
    """Return the attributes that can be pickled; data are no results."""
    # 1. Leave data out.
    results = {name: value for name, value in attributes.items() if not isinstance(value, (Dataset, DataLoader))}

    # 2. As a rule all can be sent, so they are tried together first.
    if can_be_packed(results, shared):
        return results

    # 3. Else try each.
    return {name: value for name, value in results.items() if can_be_packed(value, shared)}


def _state_of_incomplete_module(shared: list[Any], attributes: list[Attributes | None]) -> dict[str, Any] | None:
    """Return the module's whole state if the parameters or layers of a part of it cannot be sent, else None."""
    for item, sent in zip(shared, attributes, strict=True):
        if isinstance(item, nn.Module) and (sent is None or not set(STRUCTURE).issubset(sent)):
            state: dict[str, Any] = on_cpu(_users_module(shared).state_dict())
            return state
    return None


# In the caller's process


def apply_results(parts: TrainerParts, shared: list[Any], results: ProcessResults) -> Any:
    """Give the shared objects of this process the results of the process that ran.

    Returns:
        What the loop has returned.
    """
    if results.process == this_process():
        return results.result
    # 1. The shared objects. Both lists have them in the same order.
    tensors = iter(results.tensors)
    for item, attributes in zip(shared, results.attributes, strict=True):
        if isinstance(item, Tensor):
            _set_value(item, next(tensors))
        elif attributes:
            # As unpickling does it: `setattr` would run the user's properties and `__setattr__` a second time, and a
            # module would register its layers again. Attributes that were not sent stay.
            vars(item).update(attributes)
            if isinstance(item, nn.Module):
                _uncover(item)

    # 2. Layers that could not be sent.
    if results.module_state is not None:
        _load_state(_users_module(shared), results.module_state)

    # 3. The states of the trainer's parts.
    parts.logs.show(results.metrics)
    parts.strategy.portable.load_strategy_state(results.strategy)
    parts.precision.load_state_dict(results.precision)
    if results.random is not None:
        results.random.restore()
    return results.result


def _uncover(module: nn.Module) -> None:
    """Remove plain attributes that lie over layers and tensors which the run has made under their names.

    As in `self.network = None`, until `configure_model` makes it.
    """
    attributes = vars(module)
    for structure in STRUCTURE:
        for name in attributes.get(structure, ()):
            attributes.pop(name, None)


def _users_module(shared: list[Any]) -> nn.Module:
    return next(item for item in shared if isinstance(item, nn.Module))


def _load_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Load the state of a module of which some layers could not be sent; `configure_model` creates them here, too."""
    try:
        # 1. Create the layers.
        names = set(module.state_dict())
        if names != set(state) and is_a(module, LightningModule):
            module.configure_model()

        # 2. Load their values. `load_state_dict` keeps the dtypes of the new layers, so those are set afterwards.
        module.load_state_dict(state)
        tensors = module.state_dict(keep_vars=True)
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                continue
            value = state[name]
            if tensor.dtype != value.dtype:
                tensor.data = value
    except Exception as error:
        raise WorkerError(
            f"Training is done, but layers that {type(module).__name__} made in the meantime can neither be sent to"
            " this process nor be made here by `configure_model`. Make them in `__init__`, or save a checkpoint."
        ) from error


def _set_value(tensor: Tensor, value: Tensor) -> None:
    # A lazy module has found its shapes in the run, and one on the meta device its memory.
    fits = tensor.shape == value.shape and tensor.dtype == value.dtype
    with torch.no_grad():
        if tensor.is_meta:
            give_memory(tensor, value)
        elif fits:
            tensor.data.copy_(value)
        else:
            tensor.data = value
