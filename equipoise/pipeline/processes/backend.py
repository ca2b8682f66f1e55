"""Optimisers, gradients and state of a pipeline whose stages lie in several processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from equipoise.errors import ConfigurationError, StepError
from equipoise.parallel.communication.membership import compute_metrics_alone
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.payload.shared_payload import dumps
from equipoise.pipeline.processes.client import StageClient
from equipoise.pipeline.processes.gradients import gradient_norm, sum_tied_gradients

__all__ = ["ProcessBackend"]


class ProcessBackend:
    """Optimisers and states, of which every process has those of its stage's parameters.

    The user's optimiser stays as it is, and steps the parameters of the main process: all others have no gradient
    there. Each worker has an optimiser of the same class and options for its parameters. Its state returns to the main
    process together with the module.

    Args:
        processes: The workers.
        module: The user's module, all of which is still in this process.

    Attributes:
        release: Restores the module's metrics.
    """

    def __init__(self, processes: StageClient, module: nn.Module) -> None:
        self.processes = processes
        self._module = module
        self._optimizers: list[Optimizer] = []
        # For the number of an optimiser the groups of parameters that the workers have received.
        self._sent: dict[int, list[list[int]]] = {}
        self.release = compute_metrics_alone(module)
        processes.begin(module, before_move=self._recall_states)

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self.processes.devices[-1]

    # Optimisers.

    def _number_of(self, optimizer: Optimizer) -> int:
        """Return the number by which the workers know an optimiser; send it if they lack it or its parameters."""
        index = self._find(optimizer)
        if index is None:
            _check_optimizer(optimizer)
            index = len(self._optimizers)
            self._optimizers.append(optimizer)
        groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        if self._sent.get(index) == groups:
            return index
        if index in self._sent:
            # A callback has added parameters.
            self._recall_states()
        self._send(index, optimizer)
        self._sent[index] = groups
        return index

    def _find(self, optimizer: Optimizer) -> int | None:
        # Not by `index`, which compares by equality.
        for index, candidate in enumerate(self._optimizers):
            if candidate is optimizer:
                return index
        return None

    def _send(self, index: int, optimizer: Optimizer) -> None:
        """Send every worker an optimiser for its parameters, with their state."""
        # 1. Copy the groups, whose options schedulers change, and find the states.
        processes = self.processes
        groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
        states = {}
        for parameter in optimizer_parameters(optimizer):
            if parameter in optimizer.state:
                states[parameter] = optimizer.state[parameter]

        # 2. Send each worker the states of its parameters.
        for stage in range(processes.last):
            states_of_stage = {}
            for parameter, state in states.items():
                if self._has(stage, parameter):
                    states_of_stage[parameter] = state
            description = (type(optimizer), _on_cpu(states_of_stage), groups, optimizer.defaults)
            content = dumps(description, processes.tensors)
            processes.send_command(stage, "optimizer", index, content)
        processes.messenger.flush()

        # 3. Keep only those of this process.
        self._drop_states_elsewhere(optimizer)

    def _drop_states_elsewhere(self, optimizer: Optimizer) -> None:
        """Remove the state of parameters that only workers have."""
        for parameter in optimizer_parameters(optimizer):
            if self._is_elsewhere(parameter):
                optimizer.state.pop(parameter, None)

    def _is_elsewhere(self, parameter: Tensor) -> bool:
        key = self.processes.key_of(parameter)
        return key is not None and self.processes.is_elsewhere(key)

    def _has(self, stage: int, parameter: Tensor) -> bool:
        key = self.processes.key_of(parameter)
        return key is not None and self.processes.has_tensor(stage, key)

    def _recall_states(self) -> None:
        """Fetch the state of the workers' optimisers; `_number_of` sends it again when it is needed."""
        processes = self.processes
        for index in self._sent:
            optimizer = self._optimizers[index]
            for stage, states in enumerate(processes.request_all("optimizer_state", index)):
                for key, state in states.items():
                    # The state of tied parameters is the same in all of their stages.
                    is_owner = processes.owner_of(key) == stage
                    if is_owner and processes.is_elsewhere(key):
                        parameter = processes.tensors[key]
                        optimizer.state[parameter] = state
        self._sent.clear()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        """Step an optimiser in all processes.

        Args:
            optimizer: The optimiser.
            closure: Computes the step's batch; None: the gradients are there.
            **kwargs: Further arguments of the optimiser's `step`.

        Returns:
            What the optimiser's `step` returns.
        """
        # 1. Step this process's parameters.
        if closure is None:
            result = optimizer.step(**kwargs)
        else:
            checked_closure = _called_once(closure, optimizer)
            result = optimizer.step(closure=checked_closure, **kwargs)

        # 2. Step those of the workers, with the current options of this optimiser.
        index = self._number_of(optimizer)
        options = [_options_of(group) for group in optimizer.param_groups]
        self.processes.send_to_all("optimize", index, options, kwargs)
        # Options may be tensors, which schedulers change in place.
        self.processes.messenger.flush()
        return result

    @contextmanager
    def _gathered_state(self, optimizer: Optimizer) -> Iterator[None]:
        """Have the whole state of an optimiser in this process."""
        was_sent = any(self._optimizers[index] is optimizer for index in self._sent)
        if was_sent:
            self._copy_states(optimizer)
        try:
            yield
        finally:
            if was_sent:
                self._drop_states_elsewhere(optimizer)

    def _copy_states(self, optimizer: Optimizer) -> None:
        """Fetch an optimiser's state, which the workers keep as well."""
        sent = dict(self._sent)
        self._recall_states()
        self._sent = sent
        for index in sent:
            if self._optimizers[index] is not optimizer:
                self._drop_states_elsewhere(self._optimizers[index])

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimiser."""
        with self._gathered_state(optimizer):
            return optimizer.state_dict()

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
        processes = self.processes
        index = self._number_of(optimizer)
        parameters = optimizer_parameters(optimizer)
        for parameter in parameters:
            if parameter.grad is not None and self._is_elsewhere(parameter):
                raise StepError(
                    f"`training_step` uses {self._name_of(parameter)} beside the network's call, but that lies in the"
                    f" process of stage {processes.owner_of(processes.key_of(parameter) or 0)}. Use it within the"
                    " network's forward, or take engine='threads'."
                )

        sum_tied_gradients(processes, parameters)
        if factor is not None:
            processes.send_to_all("scale", index, factor)
            processes.messenger.flush()

    def _name_of(self, parameter: nn.Parameter) -> str:
        named_parameters = self._module.named_parameters()
        return next(name for name, candidate in named_parameters if candidate is parameter)

    def clip(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Clip gradients over all stages.

        Args:
            optimizer: Optimiser of the parameters.
            value: Largest norm of all gradients, or largest absolute value of each entry.
            algorithm: "norm" or "value".

        Raises:
            ConfigurationError: If the algorithm is another one.
        """
        index = self._number_of(optimizer)
        parameters = optimizer_parameters(optimizer)
        if algorithm == "value":
            self.processes.send_to_all("clip", index, value, None)
            nn.utils.clip_grad_value_(parameters, value)
        elif algorithm == "norm":
            norm = gradient_norm(self.processes, index, parameters)
            self.processes.send_to_all("clip", index, value, norm)
            nn.utils.clip_grads_with_norm_(parameters, value, norm)
        else:
            raise ConfigurationError(f"Gradients are clipped by 'norm' or by 'value', not by {algorithm!r}.")
        self.processes.messenger.flush()

    def unscale_workers(self, optimizer: Optimizer, scale: float) -> bool:
        """Divide the gradients of the workers by a loss scale, and return True if all of them are finite."""
        index = self._number_of(optimizer)
        return all(self.processes.request_all("unscale", index, scale))

    # State.

    def module_state(self) -> dict[str, Any]:
        """Return the whole state of the module."""
        with self.processes.gathered_parameters():
            return self._module.state_dict()

    def load_module_state(self, state: dict[str, Any], *, strict: bool) -> None:
        """Load the whole state of the module during a run."""
        with self.processes.gathered_parameters(changed=True):
            self._module.load_state_dict(state, strict=strict)

    def end(self) -> None:
        """Take back all parameters and states at the end of a run."""
        self._recall_states()
        self.processes.gather_parameters()
        self.processes.end()


def _check_optimizer(optimizer: Optimizer) -> None:
    """Check that an optimiser can step its parameters in several processes.

    Raises:
        ConfigurationError: If it cannot.
    """
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(_several_evaluations(optimizer))
    if type(optimizer).__getstate__ is not Optimizer.__getstate__:
        raise ConfigurationError(
            f"{type(optimizer).__name__} keeps more than torch's optimisers do, so it cannot be shared out over the"
            " processes of a pipeline. Take engine='threads', or another optimiser."
        )


def _called_once(closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    """Return a closure that raises an error when it is called again."""
    was_called = False

    def run_closure() -> Any:
        nonlocal was_called
        if was_called:
            raise StepError(_several_evaluations(optimizer))
        was_called = True
        return closure()

    return run_closure


def _several_evaluations(optimizer: Optimizer) -> str:
    """Return the text of an error."""
    return (
        f"{type(optimizer).__name__} computes a batch several times in a step, which a pipeline over processes does not"
        " do. Take engine='threads', or another optimiser."
    )


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    options = dict(group)
    del options["params"]
    return options


def _on_cpu(value: Any) -> Any:
    """Return nested dictionaries with their tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return value
