"""Optimisers, gradients and state of a pipeline whose stages lie in several processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from equipoise.errors import ConfigurationError, StepError
from equipoise.extensions.pipeline.processes.main_process.client import StageClient
from equipoise.extensions.pipeline.processes.optimizers.divided_state import DividedState
from equipoise.extensions.pipeline.processes.optimizers.local_gradients import (
    Number,
    scale_gradients,
    unscale_gradients,
)
from equipoise.extensions.pipeline.processes.optimizers.process_gradients import (
    collect_gradients,
    gradient_norm,
    share_gradients,
    sum_tied_gradients,
    summed_gradients,
)
from equipoise.interop.torch.optimizers import steps_as_torch
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.optimizers.clipping import clip_by_value
from equipoise.parallel.optimizers.combined_optimizer import CombinedOptimizer
from equipoise.parallel.payload.shared_payload import dumps
from equipoise.strategies.portable_state import LoadState, PortableState, SaveState

__all__ = ["ProcessBackend"]


class ProcessBackend(PortableState):
    """Optimisers and states, of which every process has those of its stage's parameters.

    An optimiser of torch stays as it is, and steps the parameters of the main process: all others have no gradient
    there. Each worker has an optimiser of the same class and options for its parameters. Its state returns to the main
    process together with the module.

    Any other optimiser may look at all of its parameters, or at the loss. It keeps its state in the main process, which
    has all parameters and gradients while the optimiser steps.

    Args:
        processes: The workers.
        module: The user's module, all of which is still in this process.
        own_state: Function that returns the strategy's own state; see `PortableState`.
        load_own_state: Function that restores it.
        copies: Copies of the module that callbacks have, such as averages of its weights. Default: none.
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
        self._module = module
        self._optimizers: list[Optimizer] = []
        # For the number of an optimiser the groups of parameters that the workers have received, and whether they step.
        self._sent: dict[int, tuple[list[list[int]], bool]] = {}
        processes.begin(module, self._recall_states, copies)
        self._commands = processes.commands
        self._placement = processes.placement
        self._transfer = processes.transfer

        def complete(copied: nn.Module, state: dict[str, Any], *rest: Any) -> None:
            self._transfer.complete(state)

        # Torch takes no method, and annotates nothing here.
        self._hooks: list[Any] = []
        for copied in copies:
            self._hooks.append(copied.register_state_dict_post_hook(complete))  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._commands.devices[-1]

    # Optimisers.

    def number_of(self, optimizer: Optimizer) -> Number:
        """Return the number by which the workers know an optimiser; send it if they lack it or its parameters."""
        if isinstance(optimizer, CombinedOptimizer):
            # Twice: one whose parameters are others than before recalls the states of all.
            for part in optimizer.optimizers:
                self._number_of_one(part)
            return tuple(self._number_of_one(part) for part in optimizer.optimizers)
        return self._number_of_one(optimizer)

    def _number_of_one(self, optimizer: Optimizer) -> int:
        index = self._find(optimizer)
        if index is None:
            index = len(self._optimizers)
            self._optimizers.append(optimizer)
        is_divided = isinstance(optimizer.state, DividedState)
        content = (_identities_of(optimizer), _is_shared_out(optimizer))
        if index in self._sent and self._sent[index][1] and not is_divided:
            # The user has loaded another state.
            del self._sent[index]
        if self._sent.get(index) == content:
            return index
        if index in self._sent:
            # A callback has added parameters, or a hook of the step.
            self._recall_states()
        self._send(index, optimizer)
        self._sent[index] = content
        return index

    def _find(self, optimizer: Optimizer) -> int | None:
        # Not by `index`, which compares by equality.
        for index, candidate in enumerate(self._optimizers):
            if candidate is optimizer:
                return index
        return None

    def _send(self, index: int, optimizer: Optimizer) -> None:
        """Send every worker an optimiser for its parameters, with their state."""
        if not _is_shared_out(optimizer):
            # The workers only need to know its parameters.
            optimizer = Optimizer([{"params": group["params"]} for group in optimizer.param_groups], {})
        # 1. Copy the groups, whose options schedulers change, and find the states.
        groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
        # `state` is a defaultdict, so reading would add an entry.
        with_state = [parameter for parameter in optimizer_parameters(optimizer) if parameter in optimizer.state]

        # 2. Send each worker the states of its parameters.
        for stage, keys in enumerate(self._placement.keys_of_workers):
            of_stage = [parameter for parameter in with_state if self._placement.key_of(parameter) in keys]
            states_of_stage = {parameter: _on_cpu(optimizer.state[parameter]) for parameter in of_stage}
            description = (type(optimizer), states_of_stage, groups, optimizer.defaults)
            content = dumps(description, self._placement.tensors)
            self._commands.send_command(stage, "optimizers.load", index, content)
        self._commands.messenger.flush()

        # 3. Keep only those of this process.
        self._drop_states_elsewhere(optimizer)

    def _drop_states_elsewhere(self, optimizer: Optimizer) -> None:
        if not _is_shared_out(optimizer):
            return
        for parameter in optimizer_parameters(optimizer):
            if self._is_elsewhere(parameter):
                optimizer.state.pop(parameter, None)
        if not isinstance(optimizer.state, DividedState):
            state: Any = DividedState(optimizer.state, self._recall_states)
            optimizer.state = state

    def _is_elsewhere(self, parameter: Tensor) -> bool:
        return self._placement.is_elsewhere(self._placement.key_of(parameter))

    def _recall_states(self) -> None:
        """Fetch the state of the workers' optimisers; `number_of` sends it again when it is needed."""
        for index in self._sent:
            self._fetch_states(index)
            state: Any = self._optimizers[index].state
            if isinstance(state, DividedState):
                state = state.here
            self._optimizers[index].state = state
        self._sent.clear()

    def _fetch_states(self, index: int) -> None:
        """Fetch the state of the workers for an optimiser."""
        placement = self._placement
        optimizer = self._optimizers[index]
        for states in self._commands.request_all("optimizers.state_of", index):
            for key, state in states.items():
                # The state of tied parameters is the same in all of their stages.
                if placement.is_elsewhere(key):
                    optimizer.state[placement.tensors[key]] = state
        # In the order of one device.
        for parameter in optimizer_parameters(optimizer):
            if parameter in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(parameter)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        """Step an optimiser in all processes.

        Args:
            optimizer: The optimiser.
            closure: Computes the step's batch; None: the gradients exist already.
            **kwargs: Further arguments of the optimiser's `step`.

        Returns:
            What the optimiser's `step` returns.
        """
        if isinstance(optimizer, CombinedOptimizer):
            result = None if closure is None else closure()
            for part in optimizer.optimizers:
                self.optimizer_step(part, None, **kwargs)
            return result
        if not _is_shared_out(optimizer):
            # A hook may be new: the workers then return the state.
            self._number_of_one(optimizer)
            return self._step_here(optimizer, closure, kwargs)

        # 1. Step this process's parameters. The user may have changed those that workers have, too.
        def compute() -> Any:
            loss = None if closure is None else closure()
            self._transfer.send_shared()
            share_gradients(self.processes, optimizer_parameters(optimizer))
            return loss

        if closure is None:
            compute()
            result = optimizer.step(**kwargs)
        else:
            result = optimizer.step(closure=compute, **kwargs)

        # 2. Step those of the workers, with the current options of this optimiser.
        index = self._number_of_one(optimizer)
        options = [
            {name: option for name, option in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self._commands.send_to_all("optimize", index, options, kwargs)
        # Options may be tensors, which schedulers change in place.
        self._commands.messenger.flush()
        self._transfer.note_shared()
        return result

    def _step_here(self, optimizer: Optimizer, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Step an optimiser in this process, which has all parameters and gradients but while the closure computes."""
        parameters = optimizer_parameters(optimizer)
        with ExitStack() as gathered:

            def compute() -> Any:
                assert closure is not None
                gathered.close()
                loss = closure()
                gathered.enter_context(self._gathered(parameters))
                return loss

            gathered.enter_context(self._gathered(parameters))
            if closure is None:
                return optimizer.step(**kwargs)
            return optimizer.step(closure=compute, **kwargs)

    @contextmanager
    def _gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Have the module and the gradients of parameters in this process within the context."""
        elsewhere = [parameter for parameter in parameters if self._is_elsewhere(parameter)]
        with self._transfer.gathered_parameters(changed=True):
            self._transfer.gather_gradients(elsewhere)
            try:
                yield
            finally:
                for parameter in elsewhere:
                    parameter.grad = None

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimiser; see `PortableState.optimizer_state`. The workers keep theirs."""
        index = self._find(optimizer)
        if index is None or index not in self._sent:
            return optimizer.state_dict()
        self._fetch_states(index)
        try:
            return optimizer.state_dict()
        finally:
            self._drop_states_elsewhere(optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load the whole state of an optimiser; workers receive theirs at the next step."""
        self._recall_states()
        optimizer.load_state_dict(state)

    # Gradients.

    def gather(self, optimizer: Optimizer, factor: float | Tensor | None) -> None:
        """Sum the gradients of tied parameters, and scale the gradients of the workers.

        Args:
            optimizer: Optimiser of the parameters.
            factor: Factor of the workers' gradients; None: they stay as they are.

        Raises:
            StepError: If the step has used a parameter of a worker outside the network's forward.
        """
        # 1. Check that no gradient was computed beside the network.
        index = self.number_of(optimizer)
        parameters = optimizer_parameters(optimizer)
        for parameter in parameters:
            key = self._placement.key_of(parameter)
            if key is not None and parameter.grad is not None and self._placement.is_elsewhere(key):
                stage = self._placement.workers_with(key)[0]
                raise StepError(
                    f"`training_step` uses {self._name_of(parameter)} beside the network's call, but that lies in the"
                    f" process of stage {stage}. Use it within the network's forward, or take engine='threads'."
                )

        # 2. Sum and scale.
        sum_tied_gradients(self.processes, parameters)
        if factor is not None:
            self._commands.send_to_all("optimizers.apply", index, scale_gradients, factor)
            self._commands.messenger.flush()

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

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next(name for name, candidate in self._module.named_parameters() if candidate is parameter)

    def clip(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Clip gradients over all stages.

        Args:
            optimizer: Optimiser of the parameters.
            value: Largest norm of all gradients, or largest absolute value of each entry.
            algorithm: "norm" or "value".

        Raises:
            ConfigurationError: If the algorithm is another one.
        """
        index = self.number_of(optimizer)
        parameters = optimizer_parameters(optimizer)
        here = [parameter for parameter in parameters if not self._is_elsewhere(parameter)]
        if algorithm == "value":
            self._commands.send_to_all("optimizers.apply", index, clip_by_value, value)
            clip_by_value(here, value)
        elif algorithm == "norm":
            norm = gradient_norm(self.processes, index, parameters)
            self._commands.send_to_all("optimizers.apply", index, nn.utils.clip_grads_with_norm_, value, norm)
            nn.utils.clip_grads_with_norm_(here, value, norm)
        else:
            raise ConfigurationError(f"Gradients are clipped by 'norm' or by 'value', not by {algorithm!r}.")
        self._commands.messenger.flush()

    def unscale_workers(self, optimizer: Optimizer, scale: float) -> bool:
        """Divide the gradients of the workers by a loss scale, and return True if all of them are finite."""
        index = self.number_of(optimizer)
        are_finite = self._commands.request_all("optimizers.apply", index, unscale_gradients, scale)
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

    def averaging(self) -> AbstractContextManager[None]:
        """Return a context in which callbacks compute with parameters of workers; see `PortableState.averaging`."""
        return self._transfer.averaging()

    def end(self) -> None:
        """Take back all parameters and states at the end of a run."""
        for hook in self._hooks:
            hook.remove()
        self._recall_states()
        self._transfer.gather_parameters()
        self.processes.end()


def _identities_of(optimizer: Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _is_shared_out(optimizer: Optimizer) -> bool:
    """Return whether each process steps its own parameters: an optimiser of torch looks at them one by one."""
    return steps_as_torch(optimizer) and not isinstance(optimizer, LBFGS)


def _on_cpu(value: Any) -> Any:
    """Return nested dictionaries with their tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return value
