"""Results of a run in another process, applied to the user's objects in this one.

The first process collects, the caller's takes over. Objects that both know stand for one another: where the module of
the first process refers to a callback, the caller's module refers to the caller's callback afterwards. What cannot be
sent, such as an open file, stays as it was.
"""

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from equipoise.errors import WorkerError
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.torch.modules import STRUCTURE
from equipoise.parallel.payload.shared_payload import can_be_packed
from equipoise.parallel.snapshot import random_state
from equipoise.trainer.logging.entry import on_cpu

if TYPE_CHECKING:
    from equipoise.trainer.lifecycle import Request
    from equipoise.trainer.trainer import Trainer

__all__ = ["ProcessResults", "apply_results", "collect", "shared_objects", "this_process"]

# Of the trainer's state and its loops: what a user, a callback or a second run reads.
_STATE = (
    "status",
    "should_stop",
    "received_sigterm",
    "progress",
    "loaded_ckpt_path",
    "managed_ckpt_path",
    "optimizers",
    "lr_scheduler_configs",
)
_LOOP = (
    "progress",
    "collection",
    "num_batches",
    "max_batches",
    "has_run",
    "last_validation",
    "waits_for_minimum",
    "left",
    "has_ended",
)


@dataclass
class ProcessResults:
    """What a run did.

    Attributes:
        result: What it returned.
        process: Where it ran; see `this_process`.
        tensors: The values of the module's parameters and buffers that the caller has as well.
        attributes: Those of each known object, in order; None where there is nothing to say.
        metrics: What the trainer's dictionaries of metrics hold.
        random: The random generators.
        strategy: What the strategy has learned.
        precision: The state of the scaler of the loss, if there is one.
        module_state: The module's whole state, where layers that it made in the run cannot be sent.
    """

    result: Any
    process: tuple[str, int] = field(default_factory=lambda: this_process())
    tensors: list[Tensor] = field(default_factory=list)
    attributes: list[dict[str, Any] | None] = field(default_factory=list)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    random: random_state.RandomState | None = None
    strategy: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)
    module_state: dict[str, Any] | None = None


def this_process() -> tuple[str, int]:
    """The machine and the number on it: processes of several machines may have the same number."""
    return socket.gethostname(), os.getpid()


def shared_objects(trainer: "Trainer", request: "Request") -> list[Any]:
    """Everything of the user's that a run may change, in an order that is the same in all processes."""
    owners = [trainer, trainer.run_state, *_loops(trainer), request.module, *request.module.modules()]
    owners += [request.datamodule, *trainer.callbacks, *trainer.loggers]
    others = [trainer.connected_strategy, trainer.precision_in_use, trainer.profiler, *_tensors(request.module)]
    seen: dict[int, Any] = {id(each): each for each in (*owners, *others) if each is not None}
    return list(seen.values())


def _loops(trainer: "Trainer") -> list[Any]:
    loop = trainer.fit_loop_state
    return [loop.fit, loop.fit.data, loop.val_loop, *trainer.evaluations.values(), trainer.predict_loop]


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    return (*module.parameters(), *module.buffers())


def collect(trainer: "Trainer", known: list[Any], result: Any) -> ProcessResults:
    """What a run has done to the known objects of this process."""
    loops = {id(loop) for loop in _loops(trainer)}
    attributes: list[dict[str, Any] | None] = []
    tensors = []
    for each in known:
        if isinstance(each, Tensor):
            tensors.append(each.detach().cpu())
            attributes.append(None)
            continue
        state = vars(each) if hasattr(each, "__dict__") else {}
        if each is trainer:
            state = {}
        elif each is trainer.run_state:
            state = {name: state[name] for name in _STATE}
        elif id(each) in loops:
            state = {name: state[name] for name in _LOOP if name in state}
        elif any(each is other for other in (trainer.connected_strategy, trainer.precision_in_use, trainer.profiler)):
            state = {}
        attributes.append(_sendable(state, known))
    modules = [(each, sent) for each, sent in zip(known, attributes, strict=True) if isinstance(each, nn.Module)]
    complete = all(sent is not None and set(STRUCTURE) <= set(sent) for _, sent in modules)
    whole = None if complete or not modules else on_cpu(modules[0][0].state_dict())
    return ProcessResults(
        result,
        tensors=tensors,
        attributes=attributes,
        metrics=trainer.logs.shown(),
        random=random_state.capture(),
        strategy=trainer.connected_strategy.state_dict(),
        precision=trainer.precision_in_use.state_dict(),
        module_state=whole,
    )


def _sendable(state: dict[str, Any], known: list[Any]) -> dict[str, Any]:
    state = {name: value for name, value in state.items() if not isinstance(value, (Dataset, DataLoader))}  # no results
    if can_be_packed(state, known):
        return dict(state)
    return {name: value for name, value in state.items() if can_be_packed(value, known)}


def apply_results(trainer: "Trainer", known: list[Any], effects: ProcessResults) -> Any:
    """Makes the known objects of this process what they are in the process that ran; returns the run's result."""
    if effects.process == this_process():
        return effects.result
    values = iter(effects.tensors)
    for each, state in zip(known, effects.attributes, strict=True):
        if isinstance(each, Tensor):
            _take_value(each, next(values))
        elif state:
            vars(each).update(state)
    if effects.module_state is not None:
        _take_state(next(each for each in known if isinstance(each, nn.Module)), effects.module_state)
    trainer.logs.show(effects.metrics)
    trainer.connected_strategy.load_state_dict(effects.strategy)
    trainer.precision_in_use.load_state_dict(effects.precision)
    if effects.random is not None:
        effects.random.restore()
    return effects.result


def _take_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Loads the state of a module of which some layers could not be sent; `configure_model` makes them here, too."""
    try:
        if set(module.state_dict()) != set(state) and is_a(module, LightningModule):
            module.configure_model()
        module.load_state_dict(state)
        for name, tensor in module.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor) and tensor.dtype != state[name].dtype:
                tensor.data = state[name]
    except Exception as error:
        raise WorkerError(
            f"Training is done, but layers that {type(module).__name__} made in the meantime can neither be sent to"
            " this process nor be made here by `configure_model`. Make them in `__init__`, or save a checkpoint."
        ) from error


def _take_value(tensor: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        if tensor.shape != value.shape or tensor.dtype != value.dtype or tensor.is_meta:
            tensor.data = value  # a lazy module has come to know its shape
        else:
            tensor.data.copy_(value)
