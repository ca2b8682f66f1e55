"""Optimisers of a pipeline whose stages lie in several processes: their states, and their steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from equipoise.extensions.pipeline.processes.main_process.client import StageClient
from equipoise.extensions.pipeline.processes.optimizers.divided_state import DividedState
from equipoise.extensions.pipeline.processes.optimizers.local_gradients import Number
from equipoise.extensions.pipeline.processes.optimizers.process_gradients import share_gradients
from equipoise.interop.torch.optimizers import steps_as_torch
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.optimizers.combined_optimizer import CombinedOptimizer
from equipoise.parallel.payload.object_bytes import dumps

__all__ = ["DividedOptimizers"]


class _Content(NamedTuple):
    """What the workers have received of an optimiser.

    Attributes:
        parameters: The identities of the parameters of each group.
        is_divided: Whether each process steps its own parameters.
    """

    parameters: list[list[int]]
    is_divided: bool


class DividedOptimizers:
    """Optimisers of which every process has the state of its stages' parameters.

    An optimiser of torch stays as it is, and steps the parameters of the main process: all others have no gradient
    there. Each worker has an optimiser of the same class and options for its parameters. Its state returns to the main
    process together with the module.

    Any other optimiser may look at all of its parameters, or at the loss. It keeps its state in the main process, which
    has all parameters and gradients while the optimiser steps.

    Args:
        processes: The workers. They have begun with a module before the first optimiser is used.
    """

    def __init__(self, processes: StageClient) -> None:
        self._processes = processes
        self._commands = processes.commands
        # The workers know an optimiser by its index.
        self._optimizers: list[Optimizer] = []
        self._sent: dict[int, _Content] = {}

    # What the workers know.

    def send_if_changed(self, optimizer: Optimizer) -> Number:
        """Send the workers an optimiser, if they lack it or its parameters. Return the number by which they know it."""
        if not isinstance(optimizer, CombinedOptimizer):
            return self._send_one_if_changed(optimizer)
        # One that has changed recalls the states of all, so those before it are sent again.
        for part in optimizer.optimizers:
            self._send_one_if_changed(part)
        return tuple(self._send_one_if_changed(part) for part in optimizer.optimizers)

    def _send_one_if_changed(self, optimizer: Optimizer) -> int:
        index = self._index_of(optimizer)
        content = _Content(_identities_of(optimizer), _is_divisible(optimizer))
        sent = self._sent.get(index)
        if sent is not None and sent.is_divided and not isinstance(optimizer.state, DividedState):
            # The user has loaded another state, so that of the workers is void.
            sent = None
        if sent == content:
            return index
        if sent is not None:
            # A callback has added parameters, or a hook of the step.
            self.recall_states()
        self._send(index, optimizer, content.is_divided)
        self._sent[index] = content
        return index

    def _index_of(self, optimizer: Optimizer) -> int:
        """Return the index of an optimiser, which is a new one if it is not known yet."""
        # By identity: objects that behave like optimisers may compare otherwise.
        for index, candidate in enumerate(self._optimizers):
            if candidate is optimizer:
                return index
        self._optimizers.append(optimizer)
        return len(self._optimizers) - 1

    def _send(self, index: int, optimizer: Optimizer, is_divided: bool) -> None:
        """Send every worker an optimiser for its parameters, with their state."""
        # 1. Copy the groups, whose options schedulers change, and find the states.
        sent = optimizer if is_divided else _without_options(optimizer)
        groups = [dict(group, params=list(group["params"])) for group in sent.param_groups]
        # `state` is a defaultdict, so reading would add an entry.
        with_state = [parameter for parameter in optimizer_parameters(sent) if parameter in sent.state]

        # 2. Send each worker the states of its parameters.
        placement = self._processes.placement
        for worker, keys in enumerate(placement.keys_of_workers):
            of_worker = [parameter for parameter in with_state if placement.key_of(parameter) in keys]
            states_of_worker = {parameter: _on_cpu(sent.state[parameter]) for parameter in of_worker}
            content = dumps((type(sent), states_of_worker, groups, sent.defaults), placement.tensors)
            self._commands.send_command(worker, "optimizers.load", index, content)
        self._commands.messenger.flush()

        # 3. Keep those of this process alone.
        if is_divided:
            self._drop_states_elsewhere(optimizer)

    # States.

    def _drop_states_elsewhere(self, optimizer: Optimizer) -> None:
        """Leave an optimiser the states of this process, and fetch the others when the user looks at them."""
        for parameter in self._processes.placement.those_elsewhere(optimizer_parameters(optimizer)):
            optimizer.state.pop(parameter, None)
        if not isinstance(optimizer.state, DividedState):
            optimizer.state = DividedState(optimizer.state, self.recall_states)  # type: ignore[assignment]

    def recall_states(self) -> None:
        """Fetch the states of all optimisers. The workers receive them again when they need them."""
        for index in self._sent:
            optimizer = self._optimizers[index]
            # A state that the user has loaded counts, not the workers' one.
            if isinstance(optimizer.state, DividedState):
                self._fetch_states(optimizer)
                optimizer.state = optimizer.state.here  # type: ignore[assignment]
        self._sent.clear()

    def _fetch_states(self, optimizer: Optimizer) -> None:
        """Add the states of the workers to that of this process."""
        placement = self._processes.placement
        for states in self._commands.request_all("optimizers.state_of", self._index_of(optimizer)):
            for key, state in states.items():
                # The state of tied parameters is the same in all of their stages.
                if placement.is_elsewhere(key):
                    optimizer.state[placement.tensors[key]] = state
        # Checkpoints have states in the order of the parameters, as from one device.
        for parameter in optimizer_parameters(optimizer):
            if parameter in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(parameter)

    def state_dict_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimiser. The workers keep theirs."""
        if not isinstance(optimizer.state, DividedState):
            return optimizer.state_dict()
        self._fetch_states(optimizer)
        try:
            return optimizer.state_dict()
        finally:
            self._drop_states_elsewhere(optimizer)

    # Steps.

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
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
                self.step(part, None, **kwargs)
            return result
        if not _is_divisible(optimizer):
            # A hook of the step may be new: the workers then return the state.
            self._send_one_if_changed(optimizer)
            return self._step_here(optimizer, closure, kwargs)
        # An optimiser of torch computes the closure first, and returns its result.
        result = None if closure is None else closure()
        self._step_everywhere(optimizer, kwargs)
        return result

    def _step_everywhere(self, optimizer: Optimizer, kwargs: dict[str, Any]) -> None:
        """Step the parameters of each process there."""
        # 1. Step those of this process. The user may have changed those that workers have, too.
        transfer = self._processes.transfer
        transfer.send_shared()
        share_gradients(self._processes, optimizer_parameters(optimizer))
        optimizer.step(**kwargs)

        # 2. Step those of the workers, with the current options of this optimiser.
        index = self._send_one_if_changed(optimizer)
        options = [
            {name: option for name, option in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self._commands.send_to_all("optimize", index, options, kwargs)
        # Options may be tensors, which schedulers change in place.
        self._commands.messenger.flush()
        transfer.note_shared()

    def _step_here(self, optimizer: Optimizer, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Step an optimiser in this process, which has all parameters and gradients but while the closure computes."""
        parameters = optimizer_parameters(optimizer)
        if closure is None:
            with self._gathered(parameters):
                return optimizer.step(**kwargs)
        with ExitStack() as gathered:

            def compute() -> Any:
                gathered.close()
                loss = closure()
                gathered.enter_context(self._gathered(parameters))
                return loss

            gathered.enter_context(self._gathered(parameters))
            return optimizer.step(closure=compute, **kwargs)

    @contextmanager
    def _gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Have the module and the gradients of parameters in this process within the context."""
        transfer = self._processes.transfer
        elsewhere = self._processes.placement.those_elsewhere(parameters)
        with transfer.gathered_parameters(changed=True):
            transfer.gather_gradients(elsewhere)
            try:
                yield
            finally:
                for parameter in elsewhere:
                    parameter.grad = None


def _identities_of(optimizer: Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _is_divisible(optimizer: Optimizer) -> bool:
    """Return whether each process can step its own parameters: an optimiser of torch looks at them one by one."""
    return steps_as_torch(optimizer) and not isinstance(optimizer, LBFGS)


def _without_options(optimizer: Optimizer) -> Optimizer:
    """Return an optimiser that lets workers know the parameters of one which they do not step."""
    return Optimizer([{"params": group["params"]} for group in optimizer.param_groups], {})


def _on_cpu(value: Any) -> Any:
    """Return nested dictionaries with their tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return value
