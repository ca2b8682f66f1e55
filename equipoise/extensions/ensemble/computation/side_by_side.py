"""The members' steps side by side: a call of a network with parts of the batch is computed once for all of them.

    member 0    training_step ──> net(x) ──> one vmap ──> loss
    member 1    training_step ──> net(x) ──> its output ──> loss
    member 2    training_step ──> net(x) ──> its output ──> loss

The calls of the other members are known where the first one makes its own: their arguments are the same parts of their
batches. Everything else in a step runs once for each member, one after the other and unchanged. A call that others do
not make, too, or whose arguments a step has computed, is computed by each member alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torchmetrics import Metric, MetricCollection

from equipoise.errors import StepError
from equipoise.extensions.ensemble.computation.batched_call import (
    BatchedCall,
    Call,
    Computing,
    NotBatchable,
    reason_against,
    taken_apart,
)
from equipoise.extensions.ensemble.computation.early_call import EarlyCall, parts_of_batches
from equipoise.extensions.ensemble.members.stacked_members import StackedMembers
from equipoise.interop.distributed.backward_calls import BackwardCall, intercept_backwards
from equipoise.interop.torch.modules import children_of

__all__ = ["SideBySide"]

T = TypeVar("T")

# Failures after which a network is computed member by member: a call that cannot be computed together, or a member that
# does not make it.
_MOST_FAILURES = 3


class SideBySide:
    """Runs the steps of all members.

    Args:
        members: The members.
        allows_randomness: Whether networks that draw random numbers may be computed together.

    Attributes:
        reasons: Reasons why networks are computed member by member, by the names of the networks.
        has_batched: True if a call of the last steps was computed together.
    """

    def __init__(self, members: StackedMembers, *, allows_randomness: bool) -> None:
        self._members = members
        self._module = members.modules[0]
        self._randomness = "different" if allows_randomness else "error"
        # 1. The member whose step runs, and the batch of each.
        self._member = 0
        self._batches: Sequence[Any] = ()
        # 2. Calls of the first member that were computed for all, and how many of them the present member has made.
        self._early: list[EarlyCall] = []
        self._made = 0
        # 3. The networks.
        self.reasons: dict[str, str] = {}
        self._failures: Counter[str] = Counter()
        self.has_batched = False
        self._calls: dict[str, BatchedCall] = {}
        # Tells of a network that computes, whose own parts may be networks, too.
        self._computing = Computing()
        for name in _networks(self._module):
            reason = reason_against(self._module.get_submodule(name))
            if reason:
                self._note_reason(name, reason)
            else:
                self._calls[name] = BatchedCall(name, members, self._computing)
        self._interceptors = {}
        for name in self._calls:
            self._interceptors[name] = self._interceptor(name)

    def run(self, steps: Sequence[Callable[[], T]], batches: Sequence[Any]) -> list[T]:
        """Run a step of each member and return the results in order.

        Args:
            steps: The steps.
            batches: The batch of each member.

        Raises:
            BaseException: The first error of a step.
        """
        self.has_batched = False
        self._batches = batches
        results = []
        end_backwards = intercept_backwards(self._run_backward)
        try:
            with self._intercepted():
                self._members.refresh()
                for member, step in enumerate(steps):
                    self._member = member
                    self._made = 0
                    results.append(step())
                    if member:
                        self._put_back()
        finally:
            end_backwards()
            self._batches = ()
            self._member = 0
            self._early.clear()
        return results

    def _run_backward(self, call: BackwardCall) -> Any:
        """Run a backward of a step, unless it asks for gradients of parameters that stand in for stacked ones."""
        if self._early and call.inputs:
            parameters = {id(parameter) for member in self._members.modules for parameter in member.parameters()}
            if not parameters.isdisjoint(map(id, call.leaves())):
                raise StepError(
                    "`torch.autograd.grad`, or `backward(inputs=...)`, was asked for gradients of parameters in a step"
                    " of an ensemble, whose networks are computed with the stacked parameters of all members. Take"
                    " EnsembleStrategy(mode='one_by_one')."
                )
        return call.run()

    def skip(self) -> None:
        """Note that a step is computed one by one."""
        self.has_batched = False

    # Calls.

    @contextmanager
    def _intercepted(self) -> Iterator[None]:
        """Intercept the calls of networks in a `with` block."""
        covered = []
        try:
            for name, call in self._calls.items():
                interceptor = self._interceptors[name]
                for network in call.networks:
                    attributes = vars(network)
                    covered.append(attributes)
                    attributes["forward"] = interceptor
            yield
        finally:
            for attributes in covered:
                attributes.pop("forward", None)

    def _interceptor(self, name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._intercept(name, (args, kwargs))

        return forward

    def _intercept(self, name: str, call: Call) -> Any:
        """Compute a call of a network, together with those of the other members if they make the same."""
        network = self._calls[name]
        if self._computing.member is not None:
            return network.alone(self._computing.member, call)
        if name in self.reasons:
            self._leave_early(name)
            # Its parts may be networks, too.
            return network.forward_of(self._member, call)
        compute = self._take if self._member else self._compute_early
        is_known, output = compute(name, call)
        if is_known:
            return output
        return network.alone(self._member, call)

    def _compute_early(self, name: str, call: Call) -> tuple[bool, Any]:
        """Return whether a call of the first member was computed for all members before they make it, and its output.

        Args:
            name: The network.
            call: The arguments, which must be parts of the batch.
        """
        try:
            tree, tensors = taken_apart(call)
            tensors_of_members = parts_of_batches(tensors, self._batches)
            if tensors_of_members is None:
                return False, None
            with self._without_logs():
                early = EarlyCall(self._calls[name], tree, tensors_of_members, self._randomness)
        except NotBatchable as error:
            self._note_failure(name, str(error), passes=error.passes)
            return False, None
        self.has_batched = True
        self._early.append(early)
        return True, early.take_first()

    def _take(self, name: str, call: Call) -> tuple[bool, Any]:
        """Return whether a call of another member is the next one that was computed early, and its output."""
        pending = self._early[self._made :]
        if pending and pending[0].network.name == name:
            is_same, output = pending[0].take(self._member, call)
            if is_same:
                self._made += 1
                return True, output
        self._leave_early(name)
        return False, None

    def _leave_early(self, name: str) -> None:
        """Undo early calls that the present one, which is computed by itself, must not find made."""
        # The buffers of those that are computed early have their later values.
        network = self._calls[name]
        pending = self._early[self._made :] if self._member else ()
        if any(early.network.name == name or network.shares_buffers(early.network) for early in pending):
            self._put_back()

    def _put_back(self) -> None:
        """Undo the early calls that the member has not made, which it computes by itself from now on."""
        for early in reversed(self._early[self._made :]):
            early.put_back(self._member)
            self._note_failure(early.network.name, "other members do not make the calls of the first", passes=True)
        self._made = len(self._early)

    @contextmanager
    def _without_logs(self) -> Iterator[None]:
        """Let a forward that logs be computed member by member: its values would be of all members together."""
        attributes = vars(self._module)
        log = attributes.get("log")

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise NotBatchable("its forward logs")

        attributes["log"] = refuse
        try:
            yield
        finally:
            attributes.pop("log")
            if log is not None:
                attributes["log"] = log

    def _note_failure(self, name: str, reason: str, *, passes: bool) -> None:
        """Note a call that could not be computed together. One whose reason may pass is tried again."""
        self._failures[name] += 1
        if not passes or self._failures[name] >= _MOST_FAILURES:
            self._note_reason(name, reason)

    def _note_reason(self, name: str, reason: str) -> None:
        """Note that a network is computed member by member from now on."""
        self.reasons[name] = reason
        title = name or "The module"
        rank_zero_info(f"{title} is computed member by member: {reason}.")


def _networks(module: nn.Module) -> list[str]:
    """Return the names of the modules whose calls are computed together: the module, and its children with parameters.

    A container without a forward stands for its children.
    """
    names = []
    if type(module).forward is not nn.Module.forward and _has_own_forward(module):
        names.append("")
    _add_networks(module, "", names)
    return names


def _has_own_forward(module: nn.Module) -> bool:
    """Return True unless the forward is that of a base class that only raises an error."""
    return not type(module).forward.__module__.startswith(("lightning.", "pytorch_lightning."))


def _add_networks(module: nn.Module, prefix: str, names: list[str]) -> None:
    for child_name, child in children_of(module).items():
        if child is None or isinstance(child, (Metric, MetricCollection)):
            continue
        if next(child.parameters(), None) is None:
            continue
        name = f"{prefix}{child_name}"
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            _add_networks(child, f"{name}.", names)
        else:
            names.append(name)
