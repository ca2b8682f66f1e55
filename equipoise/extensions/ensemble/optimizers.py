"""The user's optimiser for all members: one step over stacked parameters, or an optimiser for each member.

An optimiser that computes each element by itself steps stacked parameters as it would step those of each member. Any
other one, and one some of whose members have no gradient, gets a twin for each other member, with a state of its own
and the present options of the user's.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from equipoise.errors import ConfigurationError
from equipoise.extensions.ensemble.members.stacked_members import StackedMembers, StackedParameter
from equipoise.interop.torch.optimizers import plain_step
from equipoise.parallel.strategy_optimizer import StrategyOptimizer

__all__ = ["MemberOptimizer", "OptimizerState"]

# Optimisers of torch that compute each element of a parameter by itself.
_ELEMENTWISE = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}
# Entries of their states that are one number for a parameter. All others have its shape.
_NUMBERS = ("step", "eta", "mu", "mu_product")

OptimizerState = dict[str, Any]


class MemberOptimizer(StrategyOptimizer):
    """An optimiser of the parameters of all members.

    Args:
        optimizer: The user's optimiser, of the first member's parameters.
        members: The members.

    Attributes:
        is_stacked: True if one step is taken over stacked parameters.

    Raises:
        ConfigurationError: If the optimiser computes a batch several times, or has parameters that no member has.
    """

    def __init__(self, optimizer: Optimizer, members: StackedMembers) -> None:
        super().__init__(optimizer)
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                "strategy='ensemble' cannot step LBFGS, which computes a batch several times, as often as each member"
                " needs. Choose an optimiser such as Adam, or train the members in runs of their own."
            )
        self._members = members
        self.is_stacked = type(optimizer) in _ELEMENTWISE
        # The parameters of each group, and those of all members.
        self._groups: list[list[Tensor]] = []
        self._parameters: list[StackedParameter] = []
        self._stacked_groups: list[list[nn.Parameter]] = []
        # The step over stacked parameters, without the record of a profiler that is not at work.
        self._plain_step: Callable[[], Any] = plain_step(optimizer) if self.is_stacked else optimizer.step
        # The optimisers of all other members, where each has one.
        self._twins: list[Optimizer] = []
        # Refuses parameters that no member has.
        self.parameters()
        if not self.is_stacked:
            self._make_twins()

    def parameters(self) -> list[StackedParameter]:
        """Return the parameters of the optimiser, in the order of its groups."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        if not _are_same(groups, self._groups):
            self._find_parameters(groups)
        return self._parameters

    def _find_parameters(self, groups: list[list[Tensor]]) -> None:
        """Find the stacked parameters of groups, which are others than before: callbacks may add parameters."""
        parameters = []
        stacked_groups = []
        for group in groups:
            of_group = [self._stacked_parameter(parameter) for parameter in group]
            stacked_groups.append([parameter.stacked for parameter in of_group])
            parameters.extend(of_group)
        self._groups = [list(group) for group in groups]
        self._parameters = parameters
        self._stacked_groups = stacked_groups

    def _stacked_parameter(self, parameter: Tensor) -> StackedParameter:
        stacked = self._members.of(parameter)
        if stacked is None:
            raise ConfigurationError(
                f"The optimiser {type(self.optimizer).__name__} has a parameter of shape"
                f" {list(parameter.shape)} that is none of the module's, so the members have none like it."
                " Register it in the module, before the run."
            )
        return stacked

    # Steps.

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimiser for all members.

        Args:
            closure: Function that computes the loss and the gradients, called once before the step. None: the gradients
                exist already.
            kwargs: Other arguments of the optimiser's `step`.
        """
        loss = None
        if closure is not None:
            loss = closure()
        self._prepare()
        if self.is_stacked:
            with self._stacked():
                result = self.optimizer.step(**kwargs) if kwargs else self._plain_step()
        else:
            result = self.optimizer.step(**kwargs)
            for twin in self._twins:
                twin.step(**kwargs)
        return result if closure is None else loss

    def _prepare(self) -> None:
        """Bring gradients and options to where the step reads them."""
        # 1. Members without a gradient must not be stepped.
        is_uneven = any(parameter.is_uneven for parameter in self.parameters())
        if self.is_stacked and is_uneven:
            states = self.member_states()
            self._make_twins()
            self._load_each(states)
        if self.is_stacked:
            return
        # 2. Each member's gradients, and the present options, which schedulers change.
        self._members.hand_out_gradients()
        for member, twin in enumerate(self._twins, start=1):
            self._copy_options(twin, member)

    @contextmanager
    def _stacked(self) -> Iterator[None]:
        """Let the user's optimiser have the stacked parameters in a `with` block."""
        self.parameters()
        groups = self.optimizer.param_groups
        originals = [group["params"] for group in groups]
        _set_parameters(groups, self._stacked_groups)
        try:
            yield
        finally:
            # Others than before, if a state was loaded.
            _set_parameters(self.optimizer.param_groups, originals)

    def _make_twins(self) -> None:
        """Make an optimiser for each other member, without a state yet."""
        self.is_stacked = False
        for member in range(1, len(self._members)):
            twin = copy.copy(self.optimizer)
            vars(twin).update(state=defaultdict(dict), param_groups=[])
            self._twins.append(twin)
            self._copy_options(twin, member)
        # Its keys are the stacked parameters, if there are any.
        for parameter in self.parameters():
            self.optimizer.state.pop(parameter.stacked, None)

    def _copy_options(self, twin: Optimizer, member: int) -> None:
        """Give a twin the present options of the user's optimiser, and the parameters of its member."""
        groups = []
        for group in self.optimizer.param_groups:
            parameters = [self._member_parameter(parameter, member) for parameter in group["params"]]
            groups.append({**group, "params": parameters})
        twin.param_groups[:] = groups

    def _member_parameter(self, parameter: Tensor, member: int) -> nn.Parameter:
        stacked = self._members.of(parameter)
        assert stacked is not None
        return stacked.members[member]

    # States.

    def member_states(self) -> list[OptimizerState]:
        """Return the state of the optimiser of each member, as its own run would save it."""
        if not self.is_stacked:
            return [optimizer.state_dict() for optimizer in (self.optimizer, *self._twins)]
        with self._stacked():
            state = self.optimizer.state_dict()
        return [_of_member(state, member) for member in range(len(self._members))]

    def load_member_states(self, states: Sequence[OptimizerState]) -> None:
        """Load a state for each member.

        Args:
            states: States as `member_states` returns them.
        """
        if self.is_stacked and _are_alike(states):
            with self._stacked():
                self.optimizer.load_state_dict(_stacked_state(states))
            return
        if self.is_stacked:
            self._make_twins()
        self._load_each(states)

    def _load_each(self, states: Sequence[OptimizerState]) -> None:
        for optimizer, state in zip((self.optimizer, *self._twins), states, strict=True):
            optimizer.load_state_dict(state)

    def release(self) -> None:
        """Leave the user's optimiser with the state of the first member."""
        if not self.is_stacked:
            return
        # Its keys were the stacked parameters.
        state = self.optimizer.state
        for parameter in self.parameters():
            entries = state.pop(parameter.stacked, None)
            if entries is not None:
                state[parameter.members[0]] = _rows_of(entries, 0)


def _are_same(groups: Sequence[Sequence[Tensor]], others: Sequence[Sequence[Tensor]]) -> bool:
    if list(map(len, groups)) != list(map(len, others)):
        return False
    return all(all(map(is_, group, other)) for group, other in zip(groups, others, strict=True))


def _set_parameters(groups: Sequence[dict[str, Any]], parameters: Sequence[Any]) -> None:
    for group, members in zip(groups, parameters, strict=True):
        group["params"] = members


def _rows_of(entries: Mapping[str, Any], member: int) -> dict[str, Any]:
    """Return the state of one parameter for one member, with memory of its own."""
    rows = {}
    for name, value in entries.items():
        if isinstance(value, Tensor):
            value = value.clone() if name in _NUMBERS else value[member].clone()
        rows[name] = value
    return rows


def _of_member(state: OptimizerState, member: int) -> OptimizerState:
    """Return the state of a stacked optimiser for one member."""
    states = {index: _rows_of(entries, member) for index, entries in state["state"].items()}
    return {**state, "state": states, "param_groups": copy.deepcopy(state["param_groups"])}


def _are_alike(states: Sequence[OptimizerState]) -> bool:
    """Return True if the states of all members have the same entries."""

    def entries_of(state: OptimizerState) -> dict[Any, Any]:
        return {index: entries.keys() for index, entries in state["state"].items()}

    first = entries_of(states[0])
    return all(entries_of(state) == first for state in states)


def _stacked_state(states: Sequence[OptimizerState]) -> OptimizerState:
    first = states[0]
    stacked: dict[Any, dict[str, Any]] = {}
    for index, entries in first["state"].items():
        stacked[index] = {}
        for name, value in entries.items():
            if isinstance(value, Tensor) and name not in _NUMBERS:
                value = torch.stack([state["state"][index][name].to(value.device) for state in states])
            stacked[index][name] = value
    return {**first, "state": stacked}
