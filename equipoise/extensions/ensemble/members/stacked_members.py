"""The members' parameters and buffers, stacked: each member's tensors are views of tensors for all of them.

    stacked     (members, *shape): what a batched call of the network computes with, and what the optimiser steps
    member k    a copy of the module whose tensors are `stacked[k]`; the first member is the module itself

So a member computes by itself or with the others, and nothing needs to be copied between the two.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from equipoise.errors import CheckpointError, ConfigurationError, StepError
from equipoise.interop.module_metrics import named_metrics
from equipoise.parallel.replicas.replica import Replica

__all__ = ["StackedMembers", "StackedParameter", "gradient_state", "own_memory", "set_gradients"]


class StackedParameter(NamedTuple):
    """A parameter of all members.

    Attributes:
        stacked: The values of all members, (members, *shape).
        members: The parameter of each member, a view of `stacked`.
        present: Members that have a gradient in this window.
    """

    stacked: nn.Parameter
    members: list[nn.Parameter]
    present: set[int]

    @property
    def is_uneven(self) -> bool:
        """True if some members have a gradient and others have none."""
        return 0 < len(self.present) < len(self.members)


class StackedMembers:
    """The module and its copies, one for each member.

    Args:
        module: The user's module, on its device.
        states: The parameters and buffers of all other members, by name.
        device: The device.

    Attributes:
        modules: The module of each member.
        parameters: The parameters.
        buffers: The buffers of all members, (members, *shape), by the identity of the module's buffer.

    Raises:
        ConfigurationError: If a metric is not registered, so that all members would share it.
    """

    def __init__(self, module: nn.Module, states: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        # 1. The copies, with their own values.
        self._replicas = [Replica(module, device) for _ in states]
        self._check_metrics(module)
        self.modules = [module]
        for replica in self._replicas:
            self.modules.append(replica.module)
        copies = self.modules[1:]
        with torch.no_grad():
            for copied, state in zip(copies, states, strict=True):
                _load(copied, state)

        # 2. Stacked parameters.
        self.parameters: list[StackedParameter] = []
        self._by_id: dict[int, StackedParameter] = {}
        rows = [self._replicas[0].sources, *(replica.copies for replica in self._replicas)]
        for column in zip(*rows, strict=True):
            self._stack_parameter(list(column))

        # The parameters of each member, and those of all members.
        self._tensors: list[Tensor] = []
        for parameter in self.parameters:
            self._tensors.append(parameter.stacked)
            self._tensors.extend(parameter.members)

        # 3. Stacked buffers. One that is registered twice is stacked once.
        self.buffers: dict[int, Tensor] = {}
        slots_of_members = [replica.buffer_slots for replica in self._replicas]
        for slots in zip(*slots_of_members, strict=True):
            sources, _, name = slots[0]
            buffers = [sources[name]]
            for _, registered, _ in slots:
                buffers.append(registered[name])
            self._stack_buffer(buffers)

    def _check_metrics(self, module: nn.Module) -> None:
        copied = {id(metric) for metric, *_ in self.metrics()}
        for name, metric in named_metrics(module).items():
            if id(metric) not in copied:
                raise ConfigurationError(
                    f"The metric {name} ({type(metric).__name__}) lies in a list, tuple or dictionary of the module, so"
                    " that all members of the ensemble would update the same one. Register it: make it an attribute, or"
                    " make the list an nn.ModuleList, the dictionary an nn.ModuleDict."
                )

    def _stack_parameter(self, members: list[Any]) -> None:
        first = members[0]
        stacked = nn.Parameter(_stack_memory(members), requires_grad=first.requires_grad)
        parameter = StackedParameter(stacked, members, set())
        self.parameters.append(parameter)
        self._by_id[id(first)] = parameter

    def _stack_buffer(self, members: list[Tensor]) -> None:
        key = id(members[0])
        if key in self.buffers:
            return
        self.buffers[key] = _stack_memory(members)

    def __len__(self) -> int:
        return len(self.modules)

    def metrics(self) -> list[list[Metric]]:
        """Return each metric of the module with its copies in the other members."""
        metrics_of_members = [replica.metrics for replica in self._replicas]
        metrics = []
        for pairs in zip(*metrics_of_members, strict=True):
            source, _ = pairs[0]
            metrics.append([source, *(copied for _, copied in pairs)])
        return metrics

    def of(self, parameter: Tensor) -> StackedParameter | None:
        """Return the stacked parameter of one of the module's; None if it is none of them."""
        return self._by_id.get(id(parameter))

    def parts(self) -> list[nn.Module]:
        """Return the module and all below it, without metrics; indices of parts are those in this list."""
        return self._replicas[0].parts

    def refresh(self) -> None:
        """Bring the stacked parameters up to date with the module before a step.

        Raises:
            StepError: If modules or parameters were added or removed.
        """
        if self._replicas[0].structure.has_changed():
            raise StepError(
                "Modules or parameters were added to the module or removed from it during a run, but the members of an"
                " ensemble have the structure of its beginning. Change it before, in `configure_model`."
            )
        for parameter in self.parameters:
            first = parameter.members[0]
            stacked = parameter.stacked
            is_trained = first.requires_grad
            if stacked.requires_grad != is_trained:
                stacked.requires_grad_(is_trained)
            # A callback may have exchanged the values of the module, which are the first member's.
            if first.data_ptr() != stacked.data_ptr():
                row = stacked.detach()[0]
                row.copy_(first.detach())
                set_data(first, row)

    def refresh_copies(self) -> None:
        """Bring the attributes and modes of the copies up to date with the module."""
        for replica in self._replicas:
            replica.refresh_attributes()

    # Gradients.

    def clear_gradients(self) -> None:
        """Begin a window: no gradients."""
        for parameter in self.parameters:
            parameter.present.clear()
        set_gradients(self._tensors, None)

    def begin_backward(self) -> None:
        """Hide the gradients of the window so far, so that those of the members themselves are new ones."""
        for parameter in self.parameters:
            set_gradients(parameter.members, None)

    def collect_gradients(self, computed: Sequence[int]) -> None:
        """Add the members' gradients of a backward to the stacked ones; the module shows those of the first member.

        Args:
            computed: The members that had a loss in a batched computation.
        """
        for parameter in self.parameters:
            stacked, members, present = parameter
            # 1. The batched computation wrote into the stacked gradient.
            if stacked.grad is not None:
                present.update(computed)
            # 2. The gradients that members computed by themselves.
            gradients = [member.grad for member in members]
            is_alone = False
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    present.add(index)
                    is_alone = True
            if is_alone:
                _add(stacked, gradients)
                set_gradients(members, None)
            _show_gradient(parameter)

    def show_gradients(self) -> None:
        """Let the module's parameters show the gradients of the first member."""
        for parameter in self.parameters:
            set_gradients(parameter.members, None)
            _show_gradient(parameter)

    def hand_out_gradients(self) -> None:
        """Give each member its gradients, as views."""
        for stacked, members, present in self.parameters:
            set_gradients(members, None)
            gradient = stacked.grad
            if gradient is None:
                continue
            rows = gradient.unbind()
            for index in present:
                set_gradients([members[index]], rows[index])

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the gradients of all members.

        Args:
            factor: A number, or one for each member, (members,).
        """
        for stacked, _, _ in self.parameters:
            if stacked.grad is not None:
                stacked.grad.mul_(_like(factor, stacked.grad))

    def load_gradients(self, parameters: Sequence[StackedParameter], state: Sequence[Any]) -> None:
        """Restore gradients.

        Args:
            parameters: The parameters.
            state: Their gradients, as `gradient_state` returned them.
        """
        for parameter, (gradient, present) in zip(parameters, state, strict=False):
            if gradient is not None:
                gradient = gradient.to(parameter.stacked.device)
            set_gradients([parameter.stacked], gradient)
            parameter.present.update(present)
        self.show_gradients()

    # States.

    def states(self) -> list[dict[str, Any]]:
        """Return the full state of each member, with memory of its own."""
        states = []
        for module in self.modules:
            states.append(own_memory(module.state_dict()))
        return states

    def release(self) -> None:
        """Give the module memory of its own, which is that of one member."""
        with torch.no_grad():
            for _, members, _ in self.parameters:
                first = members[0]
                gradient = first.grad
                if gradient is not None:
                    gradient = gradient.clone()
                set_gradients(members, None)
                values = first.detach()
                set_data(first, values.clone())
                set_gradients([first], gradient)
            for buffer in self._replicas[0].buffers():
                values = buffer.detach()
                set_data(buffer, values.clone())


def gradient_state(parameters: Sequence[StackedParameter]) -> list[Any]:
    """Return the gradients of an open window, (members, *shape), and the members that have them."""
    state = []
    for stacked, _, present in parameters:
        state.append([stacked.grad, sorted(present)])
    return state


def _show_gradient(parameter: StackedParameter) -> None:
    """Let the first member show its row of the gradient; the members have none of their own."""
    gradient = parameter.stacked.grad
    if gradient is not None and 0 in parameter.present:
        # A view, which shows what the window adds later.
        set_gradients(parameter.members[:1], gradient.select(0, 0))


def set_gradients(parameters: Sequence[Tensor], gradient: Tensor | None) -> None:
    """Set the gradient of some parameters."""
    for parameter in parameters:
        parameter.grad = gradient


def set_data(tensor: Tensor, values: Tensor) -> None:
    """Replace the memory of a tensor by that of another one; the object stays the same."""
    tensor.data = values


def _stack_memory(tensors: Sequence[Tensor]) -> Tensor:
    """Return stacked tensors, of which each of the tensors is a row from now on."""
    stacked = torch.stack([tensor.detach() for tensor in tensors])
    rows = stacked.unbind()
    for tensor, row in zip(tensors, rows, strict=True):
        set_data(tensor, row)
    return stacked


def own_memory(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state whose tensors are no views: a file would hold the memory of all members."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = value.detach().clone()
    return state


def _load(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    tensors.update(module.named_buffers())
    for name, value in state.items():
        target = tensors.get(name)
        if target is None:
            continue
        if target.shape != value.shape:
            saved_shape = list(value.shape)
            shape = list(target.shape)
            raise CheckpointError(
                f"{name} of a member has the shape {saved_shape}, but that of the module {shape}."
                " Build the model as it was."
            )
        target.copy_(value)


def _add(stacked: nn.Parameter, gradients: Sequence[Tensor | None]) -> None:
    """Add the gradients of some members to the stacked one."""
    total = stacked.grad
    rows = [gradient for gradient in gradients if gradient is not None]
    has_all = len(rows) == len(gradients)
    # 1. The first gradients of all members.
    if total is None and has_all:
        total = torch.stack(rows)
        set_gradients([stacked], total)
        return
    # 2. Others are added row by row.
    if total is None:
        total = torch.zeros_like(stacked)
        set_gradients([stacked], total)
    for row, gradient in zip(total.unbind(), gradients, strict=True):
        if gradient is not None:
            row.add_(gradient)


def _like(factor: float | Tensor, gradient: Tensor) -> float | Tensor:
    """Return factors of members in a shape that multiplies a stacked gradient."""
    if isinstance(factor, Tensor) and factor.ndim:
        ones = [1] * (gradient.ndim - 1)
        return factor.to(gradient).view(-1, *ones)
    return factor
