"""A call of a network whose forward runs as it is, and goes to the next device at the layers of a stack."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.execution.suspended_step import inside_stage
from equipoise.extensions.pipeline.stack.operation_moves import OperationMoves
from equipoise.parallel.device_work import on_device
from equipoise.to_device import to_device
from equipoise.tree import map_leaves, tensors_in

__all__ = ["StackedCall", "stages_noticed"]


class _LocalState(threading.local):
    """State of each thread."""

    call: "StackedCall | None" = None


_local = _LocalState()


class StackedCall:
    """One call of a network.

    Args:
        forward: The network's own forward.
        devices: The device of each stage.
        on_stage: Function that is called when the call reaches a layer of a later stage than before.

    Attributes:
        stage: Number of the latest stage that the call has reached.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        devices: Sequence[torch.device],
        on_stage: Callable[[], object],
    ) -> None:
        self.stage = 0
        self._forward = forward
        self._devices = devices
        self._on_stage = on_stage
        self._moves = OperationMoves(devices[0])

    def run(self, args: Any, kwargs: Any) -> Any:
        """Return the network's output.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        # A call may run within another one.
        outer = _local.call
        _local.call = self
        try:
            with inside_stage(), self._moves, on_device(self._devices[0]):
                args = self._moves.here(args)
                kwargs = self._moves.here(kwargs)
                output = self._forward(*args, **kwargs)
                # The loss is computed on the last device.
                self._moves.go_to(self._devices[-1])
                return self._moves.here(output)
        finally:
            _local.call = outer
            self._moves.forget()

    def enter_layer(self, stage: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Go to the device of a layer, and return its arguments there.

        Args:
            stage: The stage of the layer. A forward may also call layers of earlier stages again.
            args: Positional arguments of the layer.
            kwargs: Keyword arguments of the layer.
        """
        # 1. Wait for the turn of a stage that the call reaches for the first time.
        if stage > self.stage:
            self.stage = stage
            self._on_stage()
        # 2. Compute on its device from now on.
        device = self._devices[stage]
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._moves.go_to(device)
        return self._moves.here(args), self._moves.here(kwargs)


@contextmanager
def stages_noticed(
    stages: Mapping[nn.Module, int],
    devices: Sequence[torch.device],
) -> Iterator[None]:
    """Let calls notice within the context when they reach layers.

    Args:
        stages: The stage of each layer of a stack.
        devices: The device of each stage.
    """

    def enter(layer: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        stage = stages[layer]
        if _local.call is not None:
            return _local.call.enter_layer(stage, args, kwargs)
        device = devices[stage]
        if all(tensor.device == device for tensor in tensors_in((args, kwargs))):
            return None
        # Activation checkpointing computes a layer again in the backward, from arguments of the stage before.
        move = partial(_moved, device=device)
        return map_leaves(move, args), map_leaves(move, kwargs)

    with ExitStack() as hooks:
        for layer in stages:
            hooks.enter_context(layer.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        yield


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return to_device(leaf, device)
    return leaf
