"""The program of a step: forward, loss and backward as one function, which torch's compiler can compile.

The compiler runs the Python code of the step once, and later only its tensor operations. So a value that the step logs
is noted in a list, and goes to the logs after each call.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from equipoise.tree import tensors_in

__all__ = ["LoggedCall", "ProgramResult", "StepProgram"]

T = TypeVar("T")


class LoggedCall(NamedTuple):
    """One call of `self.log`: the value, detached, and the other arguments."""

    name: str
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ProgramResult(NamedTuple):
    """Result of the program of a step; the gradients are in the parameters.

    Attributes:
        loss: The loss, detached. None: the step has returned no loss, and no backward was run.
        outputs: The return value of `training_step`, its tensors detached.
        logged: The values that it logged.
    """

    loss: Tensor | None
    outputs: Any
    logged: list[LoggedCall]


class StepProgram:
    """Forward, loss and backward of a module's step.

    Args:
        module: The user's module.
        step: Its `training_step`, called with a batch and its number.
        autocast: Type of device and dtype of the mixed precision of the forward; None if there is none.

    Attributes:
        own_attributes: Names of attributes that `compute` changes.
    """

    own_attributes = ("_calls",)

    def __init__(
        self,
        module: LightningModule,
        step: Callable[[Any, int], Any],
        autocast: tuple[str, torch.dtype] | None,
    ) -> None:
        self._step = step
        self._autocast = autocast
        self._attributes = vars(module)
        self._parameters = list(module.parameters())
        # The arguments of the present call, for `passing_tensors`.
        self._arguments: tuple[Any, ...] = ()
        self._calls: list[LoggedCall] = []
        # The same object in each call, as the compiled program compares it.
        self._own_log = self._note

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call this program, or a compiled form of it, and return its result, while `self.log` notes values.

        Args:
            function: `compute`, or its compiled form.
            args: Its arguments.
        """
        self._arguments = args
        attributes = self._attributes
        # The trainer has bound this log to the module. A module with a log of its own is not compiled.
        log = attributes["log"]
        attributes["log"] = self._own_log
        try:
            return function(*args)
        finally:
            attributes["log"] = log
            self._arguments = ()

    def compute(self, batch: Any, batch_idx: int, seed: Tensor | None) -> ProgramResult:
        """Compute loss, outputs, logged values and gradients of a batch.

        Args:
            batch: The batch.
            batch_idx: Its number.
            seed: The gradient with which the backward begins; None stands for 1.
        """
        # 1. The forward and the loss.
        self._calls = []
        if self._autocast is None:
            output = self._step(batch, batch_idx)
        else:
            with torch.autocast(*self._autocast, cache_enabled=False):
                output = self._step(batch, batch_idx)
        loss = output
        if output is not None and not isinstance(output, Tensor):
            loss = output["loss"]

        # 2. The backward.
        if loss is None:
            return ProgramResult(None, None, self._calls)
        loss.backward(seed)
        return ProgramResult(loss.detach(), _detached(output), self._calls)

    def passing_tensors(self) -> Collection[Tensor]:
        """Return the tensors that are others in the next call: the batch, the seed, the gradients."""
        return [*tensors_in(self._arguments), *self.gradients()]

    def gradients(self) -> Collection[Tensor]:
        """Return the gradients of all parameters that have one."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _note(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, Tensor):
            value = value.detach().clone()
        self._calls.append(LoggedCall(name, value, args, kwargs))


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_detached(item) for item in value]
    if type(value) is tuple:
        return tuple(_detached(item) for item in value)
    return value
