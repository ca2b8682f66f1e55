"""Exchange of gradients by torch's DistributedDataParallel around the complete step."""

import contextlib
from collections.abc import Iterable
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from equipoise.errors import StepError
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.step_protocols import NO_RESULT, StepResult, TrainingStep
from equipoise.strategies.distributed.window_totals import AlongGradients, Apart, average_gradients, reading_waits

__all__ = ["TorchEngine"]

# Number of parameters that a message names.
_MOST_NAMED = 5


class TorchEngine:
    """Torch's DistributedDataParallel around the complete step.

    Args:
        module: The user's module, on its device.
        device: The device.
        options: Arguments of the wrapper, and `comm_hook`, a CommHook or None.
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
        # Whether the backward that runs gives each parameter a gradient.
        self._must_reach_all = False
        in_buckets = self._refuses_unused and hook is None
        self._total_weight, carrier = _exchange_of_total(self._trainable.values(), device, in_buckets=in_buckets)

        # 3. Wrap the module.
        self._device = device
        device_ids = None
        if device.type == "cuda":
            device_ids = [device]
        self._wrapped = DistributedDataParallel(_Redirected(module, carrier), device_ids=device_ids, **wrapper_options)
        if hook is not None:
            self._wrapped.register_comm_hook(hook.state(), hook.function)

    def forward_backward(self, step: TrainingStep, parts: Any, last: bool) -> StepResult:
        """Compute the gradients of a batch; without parts, join the exchange only."""
        if self._is_static and not last:
            raise StepError(
                "static_graph=True does not go with accumulate_grad_batches: torch's wrapper would see other steps."
                " Leave one of them out, or take engine='native'."
            )

        def compute() -> tuple[StepResult, Tensor | None]:
            result = step(parts[0]) if parts else NO_RESULT
            if last and _is_idle(result):
                return result, self._zero_loss()
            return result, None

        with contextlib.nullcontext() if last else self._wrapped.no_sync():
            # 1. The forward. The wrapper may return a plain tuple instead of the named one.
            result, zero_loss = self._wrapped(compute)
            result = StepResult(*result)
            # 2. The weight is sent before the backward, as the first bucket has to hold it.
            if last:
                self._total_weight.send(step.total_with(result))
            # 3. The backward, in which the wrapper exchanges the gradients.
            self._must_reach_all = last and zero_loss is None and self._refuses_unused
            step.backward(result)
            if zero_loss is not None:
                zero_loss.backward()
        return result

    def _zero_loss(self) -> Tensor:
        """Return a loss of 0 that depends on every parameter, for a process without a batch."""
        empty = [parameter.flatten()[:0] for parameter in self._trainable.values()]
        return torch.stack([values.sum().to(torch.float32) for values in empty]).sum()

    def collect(self) -> None:
        """Refuse parameters without a gradient by name, before hooks may remove some.

        The wrapper has completed the exchange within the backward, and would refuse the next step.
        """
        if not self._must_reach_all:
            return
        unused = [name for name, parameter in self._trainable.items() if parameter.grad is None]
        if not unused:
            return
        names = ", ".join(unused[:_MOST_NAMED])
        if len(unused) > _MOST_NAMED:
            names += f" and {len(unused) - _MOST_NAMED} more"
        raise StepError(
            f"Parameters that took no part in the loss: {names}. Say so with"
            " DDPStrategy(find_unused_parameters=True), take engine='native', or freeze them."
        )

    def finish(self, window: AccumulationWindow, optimizer: Optimizer) -> bool:
        """End a window; see `GradientExchange.finish`. The wrapper has averaged over the processes."""
        return average_gradients(window, optimizer, self._total_weight.total(), dist.get_world_size())

    def close(self) -> None:
        """Do nothing: the wrapper holds no hooks of ours."""


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


def _is_idle(result: StepResult) -> bool:
    """Return True if a backward of the loss would reach no parameter; its weight counts nevertheless."""
    # A leaf that requires a gradient, such as `torch.zeros((), requires_grad=True)` for a batch without targets.
    if result.loss is None or (result.loss.requires_grad and result.loss.grad_fn is None):
        return True
    return not isinstance(result.weight, Tensor) and result.weight == 0


def _exchange_of_total(
    parameters: Iterable[nn.Parameter], device: torch.device, *, in_buckets: bool
) -> tuple[AlongGradients | Apart, nn.Parameter | None]:
    """Return the exchange of Σw, and the parameter that it needs in the wrapped module."""
    if reading_waits(device) or not in_buckets:
        return Apart(device), None
    # A bucket holds gradients of one dtype: take that of the last parameter that is wide enough.
    dtype = torch.float32
    for parameter in parameters:
        if parameter.dtype in (torch.float32, torch.float64):
            dtype = parameter.dtype
    weight = nn.Parameter(torch.zeros((), dtype=dtype, device=device))
    return AlongGradients(weight), weight
