"""Gradients and state of a module whose stages lie in several processes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError, StepError
from equipoise.extensions.pipeline.processes.main_process.client import StageClient
from equipoise.extensions.pipeline.processes.optimizers.divided_optimizers import DividedOptimizers
from equipoise.extensions.pipeline.processes.optimizers.local_gradients import scale_gradients, unscale_gradients
from equipoise.extensions.pipeline.processes.optimizers.process_gradients import (
    collect_gradients,
    gradient_norm,
    sum_tied_gradients,
    summed_gradients,
)
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.optimizers.clipping import clip_by_value
from equipoise.strategies.portable_state import LoadState, PortableState, SaveState

__all__ = ["ProcessBackend"]


class ProcessBackend(PortableState):
    """Gradients and states, of which every process has those of its stages' parameters.

    Args:
        processes: The workers.
        module: The user's module, all of which is still in this process.
        own_state: Function that returns the strategy's own state; see `PortableState`.
        load_own_state: Function that restores it.
        copies: Copies of the module that callbacks have, such as averages of its weights. Default: none.

    Attributes:
        processes: As above.
        optimizers: The optimisers, as all processes step them.
    """

    def __init__(
        self,
        processes: StageClient,
        module: nn.Module,
        own_state: SaveState,
        load_own_state: LoadState,
        copies: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__(own_state, load_own_state)
        self.processes = processes
        self.optimizers = DividedOptimizers(processes)
        self._module = module
        processes.begin(module, self.optimizers.recall_states, copies)
        self._commands = processes.commands
        self._placement = processes.placement
        self._transfer = processes.transfer

        # Torch sets an attribute of a hook, which a method does not allow.
        def complete(copied: nn.Module, state: dict[str, Any], *_: Any) -> None:
            self._transfer.complete(state)

        self._hooks: list[Any] = []
        for copied in copies:
            self._hooks.append(copied.register_state_dict_post_hook(complete))  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._commands.devices[-1]

    # Gradients.

    def finish_gradients(self, optimizer: Optimizer, factor: float | Tensor | None) -> None:
        """Sum the gradients of tied parameters, and scale the gradients of the workers.

        Args:
            optimizer: Optimiser of the parameters.
            factor: Factor of the workers' gradients; None: they stay as they are.

        Raises:
            StepError: If the step has used a parameter of a worker outside the network's forward.
        """
        number = self.optimizers.send_if_changed(optimizer)
        parameters = optimizer_parameters(optimizer)
        self._check_gradients(parameters)
        sum_tied_gradients(self.processes, parameters)
        if factor is not None:
            self._commands.send_to_all("optimizers.apply", number, scale_gradients, factor)
            self._commands.messenger.flush()

    def _check_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Check that this process has computed no gradient of a worker's parameter."""
        for parameter in parameters:
            key = self._placement.key_of(parameter)
            if parameter.grad is None or key is None or not self._placement.is_elsewhere(key):
                continue
            name = next(name for name, candidate in self._module.named_parameters() if candidate is parameter)
            raise StepError(
                f"`training_step` uses {name} outside the network's forward, but that lies in the process of stage"
                f" {self._placement.workers_with(key)[0]}. Use it within the network's forward, or take"
                " engine='threads'."
            )

    def gradients(self, optimizers: Sequence[Optimizer], *, window_is_open: bool) -> list[Tensor | None]:
        """Return the gradients of a window, summed over the stages; see `PortableState.gradients`.

        They are loaded before the first step of a run, when all parameters are in the main process. A gradient then
        moves to the process of its stage with the parameter.
        """
        if not window_is_open:
            return []
        parameters = [parameter for optimizer in optimizers for parameter in optimizer_parameters(optimizer)]
        return summed_gradients(self.processes, parameters)

    def collect_gradients(self) -> None:
        """Have the whole gradients of tied parameters in this process, within an accumulation window."""
        collect_gradients(self.processes, list(self._module.parameters()))

    def clip(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Clip gradients over all stages.

        Args:
            optimizer: Optimiser of the parameters.
            value: Largest norm of all gradients, or largest absolute value of each entry.
            algorithm: "norm" or "value".

        Raises:
            ConfigurationError: If the algorithm is another one.
        """
        number = self.optimizers.send_if_changed(optimizer)
        parameters = optimizer_parameters(optimizer)
        here = self._placement.those_here(parameters)
        if algorithm == "value":
            self._commands.send_to_all("optimizers.apply", number, clip_by_value, value)
            clip_by_value(here, value)
        elif algorithm == "norm":
            norm = gradient_norm(self.processes, number, parameters)
            self._commands.send_to_all("optimizers.apply", number, nn.utils.clip_grads_with_norm_, value, norm)
            nn.utils.clip_grads_with_norm_(here, value, norm)
        else:
            raise ConfigurationError(f"Gradients are clipped by 'norm' or by 'value', not by {algorithm!r}.")
        self._commands.messenger.flush()

    def unscale_workers(self, optimizer: Optimizer, scale: float) -> bool:
        """Divide the gradients of the workers by a loss scale, and return True if all of them are finite."""
        number = self.optimizers.send_if_changed(optimizer)
        are_finite = self._commands.request_all("optimizers.apply", number, unscale_gradients, scale)
        return all(are_finite)

    # State.

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole state of the module; see `PortableState.module_state`."""
        with self._transfer.gathered_parameters():
            return module.state_dict()

    def load_module_state(self, module: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
        """Load the whole state of the module during a run; see `PortableState.load_module_state`."""
        with self._transfer.gathered_parameters(changed=True):
            module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimiser; see `PortableState.optimizer_state`. The workers keep theirs."""
        return self.optimizers.state_dict_of(optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load the whole state of an optimiser; workers receive theirs at the next step."""
        self.optimizers.recall_states()
        optimizer.load_state_dict(state)

    def averaging(self) -> AbstractContextManager[None]:
        """Return a context in which callbacks compute with parameters of workers; see `PortableState.averaging`."""
        return self._transfer.averaging()

    def end(self) -> None:
        """Take back all parameters and states at the end of a run."""
        for hook in self._hooks:
            hook.remove()
        self.optimizers.recall_states()
        self._transfer.gather_parameters()
        self.processes.end()
