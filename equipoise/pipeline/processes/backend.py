"""Optimisers, gradients and state of a pipeline whose stages lie in several processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, Optimizer

from equipoise.errors import ConfigurationError, StepError
from equipoise.parallel.communication.membership import compute_metrics_alone
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.payload.shared_payload import dumps
from equipoise.pipeline.processes.client import StageClient
from equipoise.pipeline.processes.loss_scale import JoinedOptimizer

__all__ = ["ProcessBackend"]


class ProcessBackend:
    """Optimisers and states, of which every process has those of its stage's parameters.

    An optimiser of the user's stays as it is, and steps the parameters that are here: others have no gradient. Each
    other process has one of the same kind and options for its own. What it has learned comes home with the module.

    Args:
        processes: The other processes.
        module: The user's module, all of which is here yet.

    Attributes:
        release: Leaves the module's metrics as they were.
    """

    def __init__(self, processes: StageClient, module: nn.Module) -> None:
        self.processes, self._module = processes, module
        self._optimizers: list[Optimizer] = []
        self._joined: list[JoinedOptimizer] = []  # the same, as a scaler sees them
        self._sent: dict[int, list[list[int]]] = {}  # by an optimiser's number the parameters that the others know of
        self.release = compute_metrics_alone(module)
        processes.begin(module)
        processes.moved = self._recall

    # Optimisers.

    def _number(self, optimizer: Optimizer) -> int:
        """The number by which the others know an optimiser; sends it if they do not yet."""
        index = next((index for index, known in enumerate(self._optimizers) if known is optimizer), None)
        if index is None:
            _check(optimizer)
            index = len(self._optimizers)
            self._optimizers.append(optimizer)
        groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        if self._sent.get(index) != groups:
            if index in self._sent:  # a callback has added parameters
                self._recall()
            self._send(index, optimizer)
            self._sent[index] = groups
        return index

    def _send(self, index: int, optimizer: Optimizer) -> None:
        processes = self.processes
        groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
        kept = {p: optimizer.state[p] for p in optimizer_parameters(optimizer) if p in optimizer.state}
        away = {p: state for p, state in kept.items() if self._is_elsewhere(p)}
        for stage in range(processes.last):
            state = {p: state for p, state in kept.items() if self._has(stage, p)}
            content = (type(optimizer), _on_cpu(state), groups, optimizer.defaults)
            processes.tell(stage, "optimizer", index, dumps(content, known=processes.tensors))
        processes.messenger.flush()
        for parameter in away:
            del optimizer.state[parameter]

    def _is_elsewhere(self, parameter: Tensor) -> bool:
        key = self.processes.key_of(parameter)
        return key is not None and self.processes.is_elsewhere(key)

    def _has(self, stage: int, parameter: Tensor) -> bool:
        key = self.processes.key_of(parameter)
        return key is not None and self.processes.holds(stage, key)

    def _recall(self) -> None:
        """Fetches what the others' optimisers have learned; they are sent anew when they are needed."""
        processes = self.processes
        for index in self._sent:
            optimizer = self._optimizers[index]
            for stage, states in enumerate(processes.ask_all("optimizer_state", index)):
                for key, state in states.items():
                    parameter = processes.tensors[key]
                    if processes.owner_of(key) == stage and processes.is_elsewhere(key):
                        optimizer.state[parameter] = state
        self._sent.clear()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        """Steps an optimiser in all processes."""
        if closure is None:
            answer = optimizer.step(**kwargs)
        else:
            calls: list[int] = []

            def once() -> Any:
                if calls:
                    raise StepError(_several_times(optimizer))
                calls.append(1)
                return closure()

            answer = optimizer.step(closure=once, **kwargs)
        index = self._number(optimizer)
        options = [{k: value for k, value in group.items() if k != "params"} for group in optimizer.param_groups]
        self.processes.tell_all("optimize", index, options, kwargs)
        self.processes.messenger.flush()  # options may be tensors, which schedulers change
        return answer

    @contextmanager
    def _at_home(self, optimizer: Optimizer) -> Iterator[None]:
        """While the whole state of an optimiser is here."""
        sent = any(self._optimizers[index] is optimizer for index in self._sent)
        if sent:
            self._recall_copies(optimizer)
        try:
            yield
        finally:
            if sent:
                for parameter in optimizer_parameters(optimizer):
                    if self._is_elsewhere(parameter):
                        optimizer.state.pop(parameter, None)

    def _recall_copies(self, optimizer: Optimizer) -> None:
        sent = dict(self._sent)
        self._recall()
        self._sent = sent  # they have it still
        for index in sent:
            if self._optimizers[index] is not optimizer:
                for parameter in optimizer_parameters(self._optimizers[index]):
                    if self._is_elsewhere(parameter):
                        self._optimizers[index].state.pop(parameter, None)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state of an optimiser."""
        with self._at_home(optimizer):
            return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Takes a whole state; the others get theirs when they step next."""
        self._recall()
        optimizer.load_state_dict(state)

    # Gradients.

    def gather(self, optimizer: Optimizer, factor: float | Tensor | None) -> None:
        """Adds up the gradients of parameters that several stages use, and weighs those of the other processes.

        Args:
            optimizer: Whose parameters.
            factor: By what gradients are multiplied; None: they stay as they are.
        """
        processes, index = self.processes, self._number(optimizer)
        for parameter in optimizer_parameters(optimizer):
            if parameter.grad is not None and self._is_elsewhere(parameter):
                name = next(name for name, each in self._module.named_parameters() if each is parameter)
                raise StepError(
                    f"`training_step` uses {name} beside the network's call, but that lies in the process of stage"
                    f" {processes.owner_of(processes.key_of(parameter) or 0)}. Use it within the network's forward, or"
                    " take engine='threads'."
                )
        ours = {processes.key_of(parameter) for parameter in optimizer_parameters(optimizer)}
        self._add_up({key: stages for key, stages in processes.shared().items() if key in ours})
        if factor is not None:
            processes.tell_all("scale", index, factor)
            processes.messenger.flush()

    def _add_up(self, shared: dict[int, list[int]]) -> None:
        """Gives the gradients of shared parameters to all who have them, summed in the order of the stages."""
        if not shared:
            return
        processes = self.processes
        keys = {stage: [key for key, stages in shared.items() if stage in stages] for stage in range(processes.last)}
        answers = processes.ask({stage: ("gradients", each) for stage, each in keys.items() if each})
        sums: dict[int, Tensor | None] = {}
        for key, stages in shared.items():
            parameter, own = processes.tensors[key], processes.holds(processes.last, key)
            given = [answers[stage][key] for stage in stages] + ([parameter.grad] if own else [])
            found = [gradient.to(parameter.device) for gradient in given if gradient is not None]
            sums[key] = sum(found[1:], found[0]) if found else None
            if own:
                parameter.grad = None if sums[key] is None else sums[key].clone()  # type: ignore[union-attr]
        for stage, each in keys.items():
            if each:
                processes.tell(stage, "set_gradients", {key: sums[key] for key in each})
        processes.messenger.flush()

    def clip(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Clips gradients over all stages."""
        index, parameters = self._number(optimizer), optimizer_parameters(optimizer)
        if algorithm == "value":
            self.processes.tell_all("clip", index, value, None)
            nn.utils.clip_grad_value_(parameters, value)
        elif algorithm == "norm":
            norm = self._norm(index, parameters)
            self.processes.tell_all("clip", index, value, norm)
            nn.utils.clip_grads_with_norm_(parameters, value, norm)
        else:
            raise ConfigurationError(f"Gradients are clipped by 'norm' or by 'value', not by {algorithm!r}.")
        self.processes.messenger.flush()

    def _norm(self, index: int, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The norm of all gradients, put together from those of parameters in their order, as on one device."""
        processes, norms = self.processes, dict[int | None, Tensor]()
        for answer in processes.ask_all("norms", index):
            norms |= answer
        found = []
        for parameter in parameters:
            norm = norms.get(processes.key_of(parameter))
            if norm is None and parameter.grad is not None:
                norm = torch.linalg.vector_norm(parameter.grad)
            if norm is not None:
                found.append(norm.to(processes.devices[-1]))
        return torch.linalg.vector_norm(torch.stack(found)) if found else torch.zeros(())

    # The scale of the loss.

    def unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Unscales the gradients of all processes, and notes whether all of them are finite."""
        index = self._number(optimizer)

        def others(scale: float) -> bool:
            return all(self.processes.ask_all("unscale", index, scale))

        self._as_joined(optimizer).unscale(scaler, others)

    def scaled_step(self, scaler: GradScaler, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Steps an optimiser in all processes, or in none."""
        self.unscale(scaler, optimizer)  # which the trainer leaves out where the optimiser could do it itself
        return self._as_joined(optimizer).scaled_step(scaler, **kwargs)

    def _as_joined(self, optimizer: Optimizer) -> JoinedOptimizer:
        joined = next((each for each in self._joined if each.is_of(optimizer)), None)
        if joined is None:
            joined = JoinedOptimizer(optimizer, self.optimizer_step, self.processes.devices[-1])
            self._joined.append(joined)
        return joined

    # States.

    def module_state(self) -> dict[str, Any]:
        """The whole state of the module."""
        with self.processes.all_at_home():
            return self._module.state_dict()

    def load_module_state(self, state: dict[str, Any], *, strict: bool) -> None:
        """Loads the whole state of the module in the midst of a run."""
        with self.processes.all_at_home(changed=True):
            self._module.load_state_dict(state, strict=strict)

    def bring_home(self) -> None:
        """Takes everything back at the end of a run."""
        self._recall()
        self.processes.bring_home()
        self.processes.forget()


def _check(optimizer: Optimizer) -> None:
    """Refuses what cannot step in parts.

    Raises:
        ConfigurationError: If it is so.
    """
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(_several_times(optimizer))
    if type(optimizer).__getstate__ is not Optimizer.__getstate__:
        raise ConfigurationError(
            f"{type(optimizer).__name__} keeps more than torch's optimisers do, so it cannot be shared out over the"
            " processes of a pipeline. Take engine='threads', or another optimiser."
        )


def _several_times(optimizer: Optimizer) -> str:
    return (
        f"{type(optimizer).__name__} computes a batch several times in a step, which a pipeline over processes does not"
        " do. Take engine='threads', or another optimiser."
    )


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    return {key: _on_cpu(item) for key, item in value.items()} if isinstance(value, dict) else value
