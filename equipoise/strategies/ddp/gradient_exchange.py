"""Gradient exchange of DDP: torch's DistributedDataParallel, or our reducer.

Both end a window with the same gradients in all processes: Σ wᵢgᵢ / Σ wᵢ over the batches of all of them.
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

from equipoise.errors import ConfigurationError, StepError
from equipoise.interop.torch import foreach
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.communication.gradient_reducer import GradientReducer
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.step_protocols import StepResult, TrainingStep
from equipoise.strategies.ddp.window_totals import AlongGradients, Apart, OnHost, TotalWeight, as_number, reading_waits

__all__ = [
    "Engine",
    "NativeEngine",
    "TorchEngine",
    "check_engine_options",
    "make_engine",
    "trainable_parameters_differ",
]

_NOTHING = StepResult(None, 0, None)


def check_engine_options(engine: str, bucket_megabytes: float, comm_hook: Any) -> None:
    """Check the arguments of the strategy that choose and configure an engine.

    Raises:
        ConfigurationError: If an argument is out of range, or if two of them exclude each other.
    """
    if engine not in ("torch", "native"):
        raise ConfigurationError(f"engine must be 'torch' or 'native', not {engine!r}.")
    if comm_hook is not None and engine == "native":
        raise ConfigurationError("comm_hook is for torch's wrapper: leave it out, or take engine='torch'.")
    if not bucket_megabytes > 0:
        raise ConfigurationError(f"bucket_megabytes must be positive, not {bucket_megabytes!r}.")


class Engine(Protocol):
    """An exchange of gradients; constructed when the first batch is trained on."""

    def __init__(self, module: nn.Module, device: torch.device, options: dict[str, Any]) -> None: ...

    def forward_backward(self, step: TrainingStep, parts: Any, last: bool) -> StepResult:
        """Compute the gradients of a batch; without parts, join the exchange only."""

    def collect(self) -> None:
        """Complete an exchange; called after a backward and before its hooks, which read the exchanged gradients."""

    def finish(self, window: AccumulationWindow, optimizer: Optimizer) -> bool:
        """End a window; return whether the weights of all processes are 0."""

    def close(self) -> None:
        """Release the module."""


def make_engine(
    name: str, module: nn.Module, device: torch.device, options: dict[str, Any], *, repeats_steps: bool
) -> "TorchEngine | NativeEngine":
    """Return the engine for a module.

    Torch's wrapper computes a step once, and runs one backward for it. In other cases the native engine replaces it.

    Args:
        name: The engine that the user has chosen, "torch" or "native".
        module: The user's module, on its device.
        device: The device.
        options: The options of the engine.
        repeats_steps: Whether a step that failed is computed again.
    """
    automatic = getattr(module, "automatic_optimization", True)
    fits_wrapper = automatic and _has_one_backward(module) and not repeats_steps
    if name == "torch" and fits_wrapper:
        return TorchEngine(module, device, options)
    return NativeEngine(module, device, options)


def trainable_parameters_differ(module: nn.Module, parameters: list[nn.Parameter], before: list[bool]) -> bool:
    """Return whether parameters were frozen or unfrozen, so that an engine no longer fits.

    Args:
        module: The user's module.
        parameters: The parameters of the engine.
        before: Whether each of them was trainable when the engine was constructed.
    """
    # Manual optimisation freezes parameters in every step, without an effect on the exchange.
    automatic = getattr(module, "automatic_optimization", True)
    for parameter, trainable_before in zip(parameters, before, strict=True):
        trainable = parameter.requires_grad
        if trainable != trainable_before and (trainable or automatic):
            return True
    return False


def _has_one_backward(module: nn.Module) -> bool:
    """Return whether the module leaves the backward to the trainer; an override may run it several times."""
    return getattr(type(module), "backward", None) is LightningModule.backward


def _is_idle(result: StepResult) -> bool:
    """Return whether the result needs no backward."""
    if result.loss is None:
        return True
    return not isinstance(result.weight, Tensor) and result.weight == 0


def _weigh(window: AccumulationWindow, optimizer: Optimizer, total: float | Tensor, divided_by: int) -> bool:
    """Turn summed gradients into the weighted mean over all processes.

    Args:
        window: The window of this process.
        optimizer: The optimiser that holds the parameters.
        total: Σw of all processes.
        divided_by: The number by which the exchange has divided the sums.

    Returns:
        Whether Σw is 0. Then no parameter keeps a gradient, as on one device.
    """
    factor = window.correction(total, divided_by)
    if factor is not None:
        foreach.multiply_([p.grad for p in optimizer_parameters(optimizer) if p.grad is not None], factor)
    if isinstance(total, Tensor) or total != 0:
        return False
    for parameter in optimizer_parameters(optimizer):
        parameter.grad = None
    return True


class _Redirected(nn.Module):
    """A module whose forward calls a function, so that a complete step runs inside torch's wrapper.

    Args:
        module: The user's module.
        weight: The parameter whose gradient carries Σw; see `AlongGradients`. None: Σw is exchanged another way.
    """

    def __init__(self, module: nn.Module, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.module = module
        self.weight = weight

    def forward(self, function: Any) -> Any:
        return function()


class TorchEngine:
    """Torch's DistributedDataParallel around the complete step.

    Args:
        module: The user's module, on its device.
        device: The device.
        options: Arguments of the wrapper, and `comm_hook`.
    """

    def __init__(self, module: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
        # 1. Separate our option from those of the wrapper, in the words of the installed torch.
        wrapper_options = dict(options)
        hook = wrapper_options.pop("comm_hook")
        if "forward_sync_buffers" not in signature(DistributedDataParallel).parameters:
            # torch < 2.12
            wrapper_options["broadcast_buffers"] = wrapper_options.pop("forward_sync_buffers")

        # 2. Choose how Σw is exchanged. A wrapper that searches the graph does not find the parameter that carries the
        #    weight, and a hook of the user may round it.
        self._trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._is_static = wrapper_options["static_graph"]
        self._refuses_unused = not wrapper_options["find_unused_parameters"] and not self._is_static
        in_buckets = self._refuses_unused and hook is None
        self._weight, carrier = _total_weight(self._trainable.values(), device, in_buckets=in_buckets)

        # 3. Wrap the module.
        self._device = device
        device_ids = None
        if device.type == "cuda":
            device_ids = [device]
        self._wrapped = DistributedDataParallel(_Redirected(module, carrier), device_ids=device_ids, **wrapper_options)
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
            if last and _is_idle(result):
                return result, self._zero_loss()
            return result, None

        with contextlib.nullcontext() if last else self._wrapped.no_sync():
            # 1. The forward. The wrapper may return a plain tuple instead of the named one.
            result, zero_loss = self._wrapped(compute)
            result = StepResult(*result)
            # 2. The weight is sent before the backward, as the first bucket has to hold it.
            if last:
                self._weight.send(step.total_with(result))
            # 3. The backward, in which the wrapper exchanges the gradients.
            step.backward(result)
            if zero_loss is not None:
                zero_loss.backward()

        # 4. Parameters without a gradient are refused by name; the wrapper would refuse the next step.
        if last and zero_loss is None and self._refuses_unused:
            for parameter in self._trainable.values():
                if parameter.grad is None:
                    raise self._unused()
        return result

    def _zero_loss(self) -> Tensor:
        """Return a loss of 0 that depends on every parameter, for a process without a batch."""
        terms = []
        for parameter in self._trainable.values():
            empty = parameter.flatten()[:0]
            terms.append(empty.sum().to(torch.float32))
        return torch.stack(terms).sum()

    def _unused(self) -> StepError:
        unused = [name for name, parameter in self._trainable.items() if parameter.grad is None]
        names = ", ".join(unused[:5])
        if len(unused) > 5:
            names += f" and {len(unused) - 5} more"
        return StepError(
            f"Parameters that took no part in the loss: {names}. Say so with"
            " DDPStrategy(find_unused_parameters=True), take engine='native', or freeze them."
        )

    def collect(self) -> None:
        """See `Engine`: the wrapper completes the exchange within the backward."""

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
        parameters: The trainable parameters.
        device: Where this process computes.
        in_buckets: Whether buckets of gradients can include Σw.
    """
    if reading_waits(device):
        return OnHost(device), None
    if not in_buckets:
        return Apart(device), None
    # A bucket holds gradients of one dtype: take that of the last parameter that is wide enough.
    dtype = torch.float32
    for parameter in parameters:
        if parameter.dtype in (torch.float32, torch.float64):
            dtype = parameter.dtype
    weight = nn.Parameter(torch.zeros((), dtype=dtype, device=device))
    return AlongGradients(weight), weight


class NativeEngine:
    """Our own reducer, which exchanges gradients once per window.

    Args:
        module: The user's module, on its device.
        device: The device.
        options: `bucket_cap_mb`, the size of a bucket in MiB; other entries are ignored.
    """

    def __init__(self, module: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
        self._automatic = bool(getattr(module, "automatic_optimization", True))
        # An override may run backward several times, and only the last run completes a gradient.
        self._one_backward = _has_one_backward(module)
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
            self._reducer.begin(step.total_with(result), eager=self._one_backward)
        step.backward(result)
        # A result without a loss runs no backward, after which the trainer would collect.
        self.collect()
        return result

    def collect(self) -> None:
        """See `Engine`."""
        if self._reducer.is_open:
            self._reducer.finish()

    def finish(self, window: AccumulationWindow, optimizer: Optimizer) -> bool:
        """See `Engine`. The reducer has summed over the processes."""
        total = as_number(self._reducer.total())
        return _weigh(window, optimizer, total, 1)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run a backward and average its gradients over the processes at once."""
        self._reducer.begin()
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._reducer.finish()
        self._reducer.scale(1 / dist.get_world_size())

    def break_off(self) -> bool:
        """End a failed attempt; gradients that were sent stay as they are, since those were complete.

        Returns:
            Whether anything was sent.
        """
        return self._reducer.break_off()

    def close(self) -> None:
        """See `Engine`."""
        self._reducer.close()
