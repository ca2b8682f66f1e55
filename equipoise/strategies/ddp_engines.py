"""How DDP exchanges gradients: by torch's DistributedDataParallel, or by a reducer of our own.

Both end a window with the same gradients in all processes: Σ wᵢgᵢ / Σ wᵢ over the parts of all of them.
"""

import contextlib
import math
from collections.abc import Iterable
from inspect import signature
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from equipoise.errors import StepError
from equipoise.parallel import foreach
from equipoise.parallel.reducer import GradientReducer
from equipoise.parallel.weighting import Weight, Window
from equipoise.strategies.steps import StepResult, TrainingStep
from equipoise.strategies.strategy import parameters_of

__all__ = ["Engine", "NativeEngine", "TorchEngine", "goes_backward_once"]

_NOTHING = StepResult(None, 0, None)


class Engine(Protocol):
    """An exchange of gradients; made when the first batch is trained on."""

    def __init__(self, module: nn.Module, device: torch.device, options: dict[str, Any]) -> None: ...

    def forward_backward(self, step: TrainingStep, parts: Any, last: bool) -> StepResult:
        """Computes the gradients of a batch; without parts, takes part in the exchange alone."""

    def collect(self) -> None:
        """Called after a backward, before its hooks, which are to see the gradients of all processes."""

    def finish(self, window: Window, optimizer: Optimizer) -> bool:
        """Ends a window; returns whether no process had any weight."""

    def close(self) -> None:
        """Lets go of the module."""


def goes_backward_once(module: nn.Module) -> bool:
    """Whether the module leaves the backward to the trainer; an override may go several times."""
    return getattr(type(module), "backward", None) is LightningModule.backward


def _is_idle(result: StepResult) -> bool:
    """Whether there is nothing to go backward through."""
    return result.loss is None or (not isinstance(result.weight, Tensor) and result.weight == 0)


def _weigh(window: Window, optimizer: Optimizer, total: float | Tensor, divided_by: int) -> bool:
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
        foreach.multiply_([p.grad for p in parameters_of(optimizer) if p.grad is not None], factor)
    nobody = not isinstance(total, Tensor) and total == 0
    if nobody:
        for parameter in parameters_of(optimizer):
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


class _Apart:
    """Σw over all processes in an exchange of its own, while the backward runs.

    Args:
        device: Where this process computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._total, self._work = device, torch.zeros(()), cast("dist.Work | None", None)

    def send(self, own: Weight) -> None:
        """Sends this process's part; every process does so at the same place in its step."""
        self._wait()  # if a closure is called again
        self._total = torch.as_tensor(own, dtype=torch.float64).to(self.device, copy=True)
        self._work = dist.all_reduce(self._total, async_op=True)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def total(self) -> float | Tensor:
        """Σw."""
        self._wait()
        return _read(self._total)


class _Along:
    """Σw in the first bucket of gradients, since a small exchange costs as much as a large one.

    The wrapper divides by the number of processes, which is undone. Numbers of samples come out as they are.

    Args:
        weight: The parameter whose gradient is Σw, of float32 or wider.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight, self._processes = weight, dist.get_world_size()
        self._near = 4 * torch.finfo(weight.dtype).eps
        self._sent: tuple[Weight, Tensor] = (0, torch.zeros_like(weight))  # a weight, and what is sent for it

    def send(self, own: Weight) -> None:
        """The first gradient to be ready."""
        seen, value = self._sent
        if isinstance(own, Tensor) or isinstance(seen, Tensor) or own != seen:
            value = torch.as_tensor(own * self._processes).to(self._weight)
            self._sent = (own, value)
        self._weight.grad = None
        torch.autograd.backward(self._weight, value)

    def total(self) -> float | Tensor:
        """Σw."""
        assert self._weight.grad is not None
        total = _read(self._weight.grad.detach())
        if not isinstance(total, Tensor):
            whole_number = math.floor(total + 0.5) if math.isfinite(total) else total
            return whole_number if abs(total - whole_number) <= self._near * total else total
        total = total.double()
        whole = total.round()
        return torch.where((total - whole).abs() <= self._near * whole, whole, total)


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
        weight = _weight_like(self._learned.values(), device) if plain and hook is None else None
        self._weight = _Apart(device) if weight is None else _Along(weight)
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

    def finish(self, window: Window, optimizer: Optimizer) -> bool:
        """See `Engine`. The wrapper has averaged over the processes."""
        return _weigh(window, optimizer, self._weight.total(), dist.get_world_size())

    def close(self) -> None:
        """See `Engine`."""


def _weight_like(parameters: Iterable[nn.Parameter], device: torch.device) -> nn.Parameter:
    """A parameter that shares a bucket with others, if any of them is wide enough."""
    wide = [p.dtype for p in parameters if p.dtype in (torch.float32, torch.float64)]
    return nn.Parameter(torch.zeros((), dtype=wide[-1] if wide else torch.float32, device=device))


def _read(total: Tensor) -> float | Tensor:
    """A total as a number, unless reading it would wait for a device."""
    return total.item() if total.device.type == "cpu" else total


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

    def finish(self, window: Window, optimizer: Optimizer) -> bool:
        """See `Engine`. The reducer has summed over the processes."""
        return _weigh(window, optimizer, _read(self._reducer.total()), 1)

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
