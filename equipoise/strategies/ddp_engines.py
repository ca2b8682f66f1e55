"""How DDP exchanges gradients: by torch's DistributedDataParallel, or by a reducer of our own.

Both end a window with the same gradients in all processes: Σ wᵢgᵢ / Σ wᵢ over the parts of all of them.
"""

import contextlib
from inspect import signature
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError, StepError
from equipoise.parallel import foreach
from equipoise.parallel.reducer import GradientReducer
from equipoise.parallel.weighting import Window
from equipoise.strategies.strategy import StepResult, TrainingStep, parameters_of

__all__ = ["Engine", "NativeEngine", "TorchEngine", "check_same_modules", "copy_from_first"]

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

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """A backward whose gradients are averaged at once."""

    def close(self) -> None:
        """Lets go of the module."""


def _is_idle(result: StepResult) -> bool:
    """Whether there is nothing to go backward through."""
    return result.loss is None or (not isinstance(result.weight, Tensor) and result.weight == 0)


def _finish(window: Window, optimizer: Optimizer, device: torch.device, divided_by: int) -> bool:
    """Turns summed gradients into the weighted mean over all processes; returns whether no process had any weight.

    Then nobody has a gradient either, as on one device.

    Args:
        window: What this process computed.
        optimizer: Whose gradients.
        device: Where this process computes.
        divided_by: By how much the exchange has divided the sums.
    """
    total = torch.as_tensor(window.total, dtype=torch.float64).to(device, copy=True)
    dist.all_reduce(total)
    known: float | Tensor = total.item() if device.type == "cpu" else total  # elsewhere reading would wait
    parameters = parameters_of(optimizer)
    factor = window.correction(known, divided_by)
    if factor is not None:
        foreach.multiply_([p.grad for p in parameters if p.grad is not None], factor)
    nobody = not isinstance(known, Tensor) and known == 0
    if nobody:
        for parameter in parameters:
            parameter.grad = None
    return nobody


class _Redirected(nn.Module):
    """A module whose forward calls whatever it is given, so that a whole step runs inside torch's wrapper."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

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
        self.device = device
        self._learned = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._tells_unused = not given["find_unused_parameters"] and not given["static_graph"]
        self._wrapped = DistributedDataParallel(
            _Redirected(module), device_ids=[device] if device.type == "cuda" else None, **given
        )
        if hook is not None:
            self._wrapped.register_comm_hook(None, hook)

    def forward_backward(self, step: TrainingStep, parts: Any, last: bool) -> StepResult:
        """See `Engine`."""

        def compute() -> tuple[StepResult, Tensor | None]:
            result = step(parts[0]) if parts else _NOTHING
            return result, self._zero() if last and _is_idle(result) else None

        with contextlib.nullcontext() if last else self._wrapped.no_sync():
            result, zero = self._wrapped(compute)
            result = StepResult(*result)
            step.backward(result)
            if zero is not None:
                zero.backward()
        if last and zero is None and self._tells_unused:
            self._check_unused()
        return result

    def _zero(self) -> Tensor:
        """A loss of 0 that every parameter takes part in, for a process without a batch."""
        return torch.stack([p.flatten()[:0].sum().to(torch.float32) for p in self._learned.values()]).sum()

    def _check_unused(self) -> None:
        unused = [name for name, parameter in self._learned.items() if parameter.grad is None]
        if unused:
            named = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
            raise StepError(
                f"Parameters that took no part in the loss: {named}. Say so with"
                " DDPStrategy(find_unused_parameters=True), take engine='native', or freeze them."
            )

    def collect(self) -> None:
        """See `Engine`: the wrapper has done it."""

    def finish(self, window: Window, optimizer: Optimizer) -> bool:
        """See `Engine`. The wrapper has averaged over the processes."""
        return _finish(window, optimizer, self.device, dist.get_world_size())

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Not for this engine."""
        raise NotImplementedError("Manual optimisation takes the native engine.")

    def close(self) -> None:
        """See `Engine`."""


class NativeEngine:
    """A reducer of our own.

    Args:
        module: The user's module, on its device.
        device: The device.
        options: `bucket_cap_mb`.
    """

    def __init__(self, module: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
        self.device, self._automatic = device, bool(getattr(module, "automatic_optimization", True))
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
            self._reducer.begin()
        step.backward(result)
        return result

    def collect(self) -> None:
        """See `Engine`."""
        if self._reducer.is_open:
            self._reducer.finish()

    def finish(self, window: Window, optimizer: Optimizer) -> bool:
        """See `Engine`. The reducer has summed over the processes."""
        self.collect()  # if there was nothing to go backward through
        return _finish(window, optimizer, self.device, 1)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """See `Engine`."""
        self._reducer.begin()
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._reducer.finish()
        self._reducer.scale(1 / dist.get_world_size())

    def close(self) -> None:
        """See `Engine`."""
        self._reducer.close()


# The same module in all processes


def check_same_modules(module: nn.Module) -> None:
    """Checks that the module has the same parameters and buffers in all processes.

    Raises:
        ConfigurationError: In every process, naming the first difference.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = [(name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in state.items()]
    all_of_them: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, own)
    first = all_of_them[0]
    for rank, other in enumerate(all_of_them):
        if other == first:
            continue
        index = next((i for i, (one, two) in enumerate(zip(first, other, strict=False)) if one != two), -1)
        one, two = (each[index] if index >= 0 else f"{len(each)} tensors" for each in (first, other))
        raise ConfigurationError(
            f"{type(module).__name__} differs between processes: rank 0 has {_described(one)}, rank {rank} has"
            f" {_described(two)}. Build it from the same configuration everywhere."
        )


def _described(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    name, shape, dtype, learned = entry
    return f"{name} of shape {list(shape)}, {dtype.removeprefix('torch.')}{'' if learned else ', frozen or a buffer'}"


def copy_from_first(module: nn.Module) -> None:
    """Gives all processes the first one's parameters and buffers."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            contiguous = tensor.detach().contiguous()
            dist.broadcast(contiguous, 0)
            if contiguous.data_ptr() != tensor.data_ptr():
                tensor.copy_(contiguous)
