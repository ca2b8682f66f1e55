"""Gradient exchange of DDP: torch's DistributedDataParallel, our reducer, or that of steps by hand.

All end with the same gradients in all processes: Σ wᵢgᵢ / Σ wᵢ over the batches of all of them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook as register_modules
from torch.nn.modules.module import register_module_parameter_registration_hook as register_parameters
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from equipoise.errors import ConfigurationError, StepError
from equipoise.interop.torch.autograd import is_in_backward
from equipoise.interop.torch.modules import has_gradient_hooks
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.communication.object_exchange import gather_objects
from equipoise.parallel.communication.tensor_copies import copy_from_first
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.step_protocols import StepResult, TrainingStep
from equipoise.strategies.ddp.exchange.by_hand.manual_engine import ManualEngine
from equipoise.strategies.ddp.exchange.native_engine import NativeEngine, has_one_backward
from equipoise.strategies.ddp.exchange.torch_engine import TorchEngine
from equipoise.strategies.distributed.module_sync import check_same_modules

__all__ = ["GradientExchange", "check_engine_options"]


class GradientExchange:
    """The exchange of a run, by the engine that fits the module's trainable parameters.

    The engine is constructed when the first batch is trained on, and replaced when parameters are frozen or unfrozen.

    Args:
        name: The engine of automatic optimisation, "torch" or "native".
        module: The user's module, on its device.
        device: The device.
        options: Arguments of torch's wrapper, of which other engines read some, and `comm_hook`, a CommHook or None.
    """

    def __init__(self, name: str, module: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
        self._engine_name = name
        self._module = module
        self._device = device
        self._options = options
        self._repeats_steps = False
        self._by_hand = not getattr(module, "automatic_optimization", True)
        self._engine: TorchEngine | NativeEngine | ManualEngine | None = None
        # The parameters for which the engine was constructed, and whether each was trainable then.
        self._parameters: list[nn.Parameter] = []
        self._were_trainable: list[bool] = []
        self._watches_steps = False
        # True once any module has got a parameter or a layer since.
        self._may_have_grown = False
        self._hooks: list[Any] = [register_parameters(self._note_growth), register_modules(self._note_growth)]

    def _note_growth(self, module: nn.Module, name: str, part: Any) -> None:
        self._may_have_grown = True

    def repeat_steps(self) -> None:
        """Use the native engine for the next engine that is constructed, since it can repeat a step."""
        self._repeats_steps = True

    def forward_backward(self, step: TrainingStep, parts: Any, last: bool) -> StepResult:
        """Compute the gradients of a batch; without parts, join the exchange only."""
        return self._current_engine().forward_backward(step, parts, last)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context manager for a step of an evaluation, in which nothing is exchanged."""
        if isinstance(self._engine, ManualEngine):
            return self._engine.paused()
        return nullcontext()

    def collect(self) -> None:
        """Complete the exchange of a window's last backward, before hooks read the exchanged gradients."""
        if self._engine is not None:
            self._engine.collect()

    def finish(self, window: AccumulationWindow, optimizer: Optimizer) -> bool:
        """End a window; return whether the weights of all processes are 0."""
        assert self._engine is not None
        if self._may_have_grown:
            self._check_growth(optimizer)
        return self._engine.finish(window, optimizer)

    def _check_growth(self, optimizer: Optimizer) -> None:
        """Refuse gradients of parameters that the step itself has added, which are not exchanged."""
        new = set(map(id, self._new_parameters()))
        if any(id(parameter) in new for parameter in optimizer_parameters(optimizer)):
            raise StepError(
                "`training_step` gives the module a parameter that it trains, whose gradient is not exchanged in this"
                " step. Add layers, and groups of the optimiser, in a hook such as `on_train_batch_start`."
            )

    def break_off(self) -> bool:
        """End a failed attempt; return whether gradients were sent. The next attempt completes the exchange."""
        if isinstance(self._engine, NativeEngine):
            return self._engine.break_off()
        return False

    def close(self) -> None:
        """Release the module."""
        for hook in self._hooks:
            hook.remove()
        self._close_engine()

    def _close_engine(self) -> None:
        engine = self._engine
        self._engine = None
        if engine is not None:
            engine.close()

    def _current_engine(self) -> TorchEngine | NativeEngine | ManualEngine:
        """Return the engine, another one if parameters were added, frozen or unfrozen since the last step."""
        if self._engine is not None:
            has_grown = self._may_have_grown and self._take_in_new_parameters()
            if has_grown or (not self._by_hand and self._trainable_parameters_differ()):
                self._close_engine()
        if self._engine is None:
            self._parameters = list(self._module.parameters())
            self._were_trainable = [parameter.requires_grad for parameter in self._parameters]
            self._watch_steps()
            self._check_trainable()
            self._engine = self._make_engine()
            # Torch's wrapper is a module itself.
            self._may_have_grown = False
        return self._engine

    def _check_trainable(self) -> None:
        """Check that the same parameters are trainable in all processes, which exchange their gradients."""
        frozen_here = {name for name, parameter in self._module.named_parameters() if not parameter.requires_grad}
        frozen = gather_objects(frozen_here)
        for rank, names in enumerate(frozen):
            differing = sorted(names ^ frozen[0])
            if differing:
                raise StepError(
                    f"{differing[0]} is frozen in some processes alone: ranks 0 and {rank} differ in its"
                    " `requires_grad`. Freeze and unfreeze parameters in all processes, whatever their rank or samples."
                )

    def _take_in_new_parameters(self) -> bool:
        """Give new parameters the values of rank 0; return whether there are any."""
        self._may_have_grown = False
        new = self._new_parameters()
        if new:
            check_same_modules(self._module)
            copy_from_first(new)
        return bool(new)

    def _new_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the module has got since the engine was constructed."""
        known = set(map(id, self._parameters))
        return [parameter for parameter in self._module.parameters() if id(parameter) not in known]

    def _watch_steps(self) -> None:
        """Refuse steps of optimisers within a backward, where hooks on gradients may take them."""
        if not self._watches_steps and any(map(has_gradient_hooks, self._parameters)):
            self._watches_steps = True
            self._hooks.append(register_optimizer_step_pre_hook(self._refuse_step_in_backward))

    def _refuse_step_in_backward(self, optimizer: Optimizer, *_: Any) -> None:
        if not is_in_backward():
            return
        exchanged = set(map(id, self._parameters))
        # It may train something else.
        if any(id(parameter) in exchanged for group in optimizer.param_groups for parameter in group["params"]):
            raise StepError(
                f"{type(optimizer).__name__} is stepped within a backward, as by a hook that"
                " `register_post_accumulate_grad_hook` has registered. Under strategy='ddp' gradients are exchanged"
                " afterwards, so each process would train weights of its own. Return the optimiser from"
                " `configure_optimizers`, or step it in `on_before_optimizer_step`."
            )

    def _trainable_parameters_differ(self) -> bool:
        """Return whether parameters were frozen or unfrozen, so that the engine no longer fits."""
        pairs = zip(self._parameters, self._were_trainable, strict=True)
        return any(parameter.requires_grad != was_trainable for parameter, was_trainable in pairs)

    def _make_engine(self) -> TorchEngine | NativeEngine | ManualEngine:
        """Return the engine for the module; the native engine takes the place of a wrapper that does not fit."""
        if self._by_hand:
            return ManualEngine(self._module, self._device, self._options)
        # Torch's wrapper computes a step once, with one backward.
        fits_wrapper = not self._repeats_steps and has_one_backward(self._module)
        if self._engine_name == "torch" and fits_wrapper:
            return TorchEngine(self._module, self._device, self._options)
        return NativeEngine(self._module, self._device, self._options)


def check_engine_options(engine: str, bucket_megabytes: float, comm_hook: Any, comm_state: Any) -> None:
    """Check the arguments of the strategy that choose and configure an engine.

    Raises:
        ConfigurationError: If an argument is out of range, or if two of them exclude each other.
    """
    if engine not in ("torch", "native"):
        raise ConfigurationError(f"engine must be 'torch' or 'native', not {engine!r}.")
    if comm_hook is not None and engine == "native":
        raise ConfigurationError("comm_hook is for torch's wrapper: leave it out, or take engine='torch'.")
    if comm_hook is None and comm_state is not None:
        raise ConfigurationError("comm_state is the state of comm_hook, which is missing. Give both, or neither.")
    if not bucket_megabytes > 0:
        raise ConfigurationError(f"bucket_megabytes must be positive, not {bucket_megabytes!r}.")
