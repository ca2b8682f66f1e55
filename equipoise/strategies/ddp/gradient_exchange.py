"""Gradient exchange of DDP: torch's DistributedDataParallel, or our reducer.

Both end a window with the same gradients in all processes: Σ wᵢgᵢ / Σ wᵢ over the parts of all of them.
"""

import contextlib
from collections.abc import Iterable
from inspect import signature
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from equipoise.errors import StepError
from equipoise.interop.torch import foreach
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.communication.gradient_reducer import GradientReducer
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.step_protocols import StepResult, TrainingStep
from equipoise.strategies.ddp.window_totals import AlongGradients, Apart, OnHost, TotalWeight, as_number, reading_waits

__all__ = ["Engine", "NativeEngine", "TorchEngine", "goes_backward_once"]

_NOTHING = StepResult(None, 0, None)


class Engine(Protocol):
    """An exchange of gradients; made when the first batch is trained on."""

    def __init__(self, module: nn.Module, device: torch.device, options: dict[str, Any]) -> None: ...

    def forward_backward(self, step: TrainingStep, parts: Any, last: bool) -> StepResult:
        """Computes the gradients of a batch; without parts, takes part in the exchange alone."""

    def collect(self) -> None:
        """Called after a backward, before its hooks, which are to see the gradients of all processes."""

    def finish(self, window: AccumulationWindow, optimizer: Optimizer) -> bool:
        """Ends a window; returns whether no process had any weight."""

    def close(self) -> None:
        """Lets go of the module."""


def goes_backward_once(module: nn.Module) -> bool:
    """Whether the module leaves the backward to the trainer; an override may go several times."""
    return getattr(type(module), "backward", None) is LightningModule.backward


def _is_idle(result: StepResult) -> bool:
    """Whether there is nothing to go backward through."""
    return result.loss is None or (not isinstance(result.weight, Tensor) and result.weight == 0)


def _weigh(window: AccumulationWindow, optimizer: Optimizer, total: float | Tensor, divided_by: int) -> bool:
    """Turns summed gradients into the weighted mean over all processes; returns whether no process had any weight.

    Then nobody has a gradient either, as on one device.

    Args:
        window: What this process computed.
        optimizer: Whose gradients.
        total: Σw of all processes.
        divided_by: By how much the exchange has divided the sums.
    """
    factor = window.correction(total, divided_by)
    if factor is not None:
        foreach.multiply_([p.grad for p in optimizer_parameters(optimizer) if p.grad is not None], factor)
    nobody = not isinstance(total, Tensor) and total == 0
    if nobody:
        for parameter in optimizer_parameters(optimizer):
            parameter.grad = None
    return nobody


class _Redirected(nn.Module):
    """A module whose forward calls whatever it is given, so that a whole step runs inside torch's wrapper.

    Args:
        module: The user's module.
        weight: What carries Σw, as the gradient of a parameter that nobody computes with. None: something else does.
    """

    def __init__(self, module: nn.Module, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.module, self.weight = module, weight

    def forward(self, function: Any) -> Any:
        return function()


class TorchEngine:
    """Torch's DistributedDataParallel around the whole step.

    Args:
        module: The user's module, on its device.
        device: The device.
        options: For the wrapper, and `comm_hook`.
    """

    def __init__(self, module: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
        given = dict(options)
        hook = given.pop("comm_hook")
        if "forward_sync_buffers" not in signature(DistributedDataParallel).parameters:  # older than torch 2.12
            given["broadcast_buffers"] = given.pop("forward_sync_buffers")
        self._learned = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._is_static = given["static_graph"]
        plain = not given["find_unused_parameters"] and not given["static_graph"]
        self._tells_unused = plain
        # A graph that is looked through does not hold the weight; a hook of the user's may round it.
        self._weight, weight = _total_weight(self._learned.values(), device, in_buckets=plain and hook is None)
        self._device = device
        self._wrapped = DistributedDataParallel(
            _Redirected(module, weight), device_ids=[device] if device.type == "cuda" else None, **given
        )
        if hook is not None:
            self._wrapped.register_comm_hook(None, hook)

    def forward_backward(self, step: TrainingStep, parts: Any, last: bool) -> StepResult:
        """See `Engine`."""
        if self._is_static and not last:
            raise StepError(
                "static_graph=True does not go with accumulate_grad_batches: torch's wrapper would see other steps."
                " Leave one of them out, or take engine='native'."
            )

        def compute() -> tuple[StepResult, Tensor | None]:
            result = step(parts[0]) if parts else _NOTHING
            return result, self._zero() if last and _is_idle(result) else None

        with contextlib.nullcontext() if last else self._wrapped.no_sync():
            result, zero = self._wrapped(compute)
            result = StepResult(*result)
            if last:
                self._weight.send(step.total_with(result))
            step.backward(result)
            if zero is not None:
                zero.backward()
        if last and zero is None and self._tells_unused:
            for parameter in self._learned.values():
                if parameter.grad is None:
                    raise self._unused()
        return result

    def _zero(self) -> Tensor:
        """A loss of 0 that every parameter takes part in, for a process without a batch."""
        return torch.stack([p.flatten()[:0].sum().to(torch.float32) for p in self._learned.values()]).sum()

    def _unused(self) -> StepError:
        unused = [name for name, parameter in self._learned.items() if parameter.grad is None]
        named = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        return StepError(
            f"Parameters that took no part in the loss: {named}. Say so with"
            " DDPStrategy(find_unused_parameters=True), take engine='native', or freeze them."
        )

    def collect(self) -> None:
        """See `Engine`: the wrapper has done it."""

    def finish(self, window: AccumulationWindow, optimizer: Optimizer) -> bool:
        """See `Engine`. The wrapper has averaged over the processes."""
        return _weigh(window, optimizer, self._weight.total(), dist.get_world_size())

    def close(self) -> None:
        """See `Engine`."""


def _total_weight(
    parameters: Iterable[nn.Parameter], device: torch.device, *, in_buckets: bool
) -> tuple[TotalWeight, nn.Parameter | None]:
    """Return the exchange of Σw, and the parameter that it needs in the wrapped module.

    Args:
        parameters: Those that are learned.
        device: Where this process computes.
        in_buckets: Whether buckets of gradients can take it along.
    """
    if reading_waits(device):
        return OnHost(device), None
    if not in_buckets:
        return Apart(device), None
    wide = [p.dtype for p in parameters if p.dtype in (torch.float32, torch.float64)]  # it shares their bucket
    weight = nn.Parameter(torch.zeros((), dtype=wide[-1] if wide else torch.float32, device=device))
    return AlongGradients(weight), weight


class NativeEngine:
    """A reducer of our own.

    Args:
        module: The user's module, on its device.
        device: The device.
        options: `bucket_cap_mb`.
    """

    def __init__(self, module: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
        self._automatic = bool(getattr(module, "automatic_optimization", True))
        # An override may go backward several times, and only the last one completes a gradient.
        self._in_one_go = goes_backward_once(module)
        self._reducer = GradientReducer(module.parameters(), options["bucket_cap_mb"])

    def forward_backward(self, step: TrainingStep, parts: Any, last: bool) -> StepResult:
        """See `Engine`."""
        if not parts and not self._automatic:
            raise StepError(
                "Some processes have no batch in this step, but the module optimises by hand, where only its step knows"
                " how often gradients are exchanged. Take a number of samples that all processes share evenly, or"
                " DataLoader(drop_last=True)."
            )
        result = step(parts[0]) if parts else _NOTHING
        if last and self._automatic:
            self._reducer.begin(step.total_with(result), eager=self._in_one_go)
        step.backward(result)
        self.collect()  # if there was nothing to go backward through
        return result

    def collect(self) -> None:
        """See `Engine`."""
        if self._reducer.is_open:
            self._reducer.finish()

    def finish(self, window: AccumulationWindow, optimizer: Optimizer) -> bool:
        """See `Engine`. The reducer has summed over the processes."""
        return _weigh(window, optimizer, as_number(self._reducer.total()), 1)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """A backward whose gradients are averaged at once."""
        self._reducer.begin()
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._reducer.finish()
        self._reducer.scale(1 / dist.get_world_size())

    def break_off(self) -> bool:
        """Ends an attempt that failed; what was sent stays as it is, since those gradients were whole.

        Returns:
            Whether anything was sent.
        """
        return self._reducer.break_off()

    def close(self) -> None:
        """See `Engine`."""
        self._reducer.close()
