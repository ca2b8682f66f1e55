"""The members' steps side by side: they meet where they call a network, which is computed once for all of them.

    member 0    training_step ──> net(x) ─┐              ┌─> loss       the calling thread
    member 1    training_step ──> net(x) ─┼─> one vmap ──┼─> loss       a thread that waits at the call
    member 2    training_step ──> net(x) ─┘              └─> loss

Everything else in a step runs once for each member, unchanged. A call that others do not make, too, is computed by the
member alone. A call with parts of the batch is computed where the first member makes it, and no thread waits.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torchmetrics import Metric, MetricCollection

from equipoise.extensions.common.step_thread import StepThread
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
from equipoise.interop.torch.modules import children_of
from equipoise.parallel.replicas.device_threads import ThreadState

__all__ = ["SideBySide"]

T = TypeVar("T")

# Failures after which a network is computed member by member.
_MOST_FAILURES = 8
# Failures of early calls of a network, after which the members are waited for: a call that cannot be computed together,
# or a member that does not make it.
_MOST_EARLY_FAILURES = 3
# Answers a thread that is to compute the call by itself.
_ALONE: Any = object()


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
        # 1. The threads of all members but the first, and the steps that they run.
        self._threads: list[StepThread] = []
        self._member_of_thread: dict[int, int] = {}
        self._steps: Sequence[Callable[[], Any]] = ()
        self._batches: Sequence[Any] = ()
        self._has_begun = False
        # The member whose step runs in the calling thread.
        self._member = 0
        # 2. Calls of the first member that were computed for all, and how many of them each member has made.
        self._early: list[EarlyCall] = []
        self._made: list[int] = []
        self._early_failures: Counter[str] = Counter()
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
            BaseException: The first error of a step. The others are ended.
        """
        self.has_batched = False
        self._steps = steps
        self._batches = batches
        self._has_begun = False
        self._made = [0] * len(steps)
        self._state = ThreadState.capture(("cpu", "cuda"))
        try:
            with self._intercepted():
                self._members.refresh()
                results = self._run_all()
                for member in range(1, len(steps)):
                    self._put_back(member)
                return results
        except BaseException:
            for thread in self._threads:
                thread.abandon()
            raise
        finally:
            self._steps = ()
            self._batches = ()
            self._member = 0
            self._early.clear()

    def _run_all(self) -> list[Any]:
        """Run the step of the first member, and the others in threads, if it has waited for them, or else in turn."""
        first, *others = self._steps
        results = [first()]
        if self._has_begun:
            self._finish()
            results.extend(thread.take_result() for thread in self._threads)
            return results
        for member, step in enumerate(others, start=1):
            self._member = member
            results.append(step())
        return results

    def skip(self) -> None:
        """Note that a step is computed one by one."""
        self.has_batched = False

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.close()
        self._threads = []

    def _begin(self) -> None:
        """Run all other steps to their first calls."""
        self._has_begun = True
        if not self._threads:
            for member in range(1, len(self._steps)):
                thread = StepThread(f"equipoise-member-{member}")
                self._threads.append(thread)
                self._member_of_thread[thread.ident] = member
        for thread, step in zip(self._threads, self._steps[1:], strict=True):
            thread.start(step, self._state)

    def _finish(self) -> None:
        """Run all other steps to their ends."""
        for thread in self._threads:
            while thread.call is not None:
                thread.resume(_ALONE)

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
        member_of_thread = self._member_of_thread.get(get_ident())
        member = self._member if member_of_thread is None else member_of_thread
        if name in self.reasons:
            # Its parts may meet.
            return network.forward_of(member, call)
        if member == 0:
            is_known, output = self._compute_early(name, call)
        else:
            is_known, output = self._take(member, name, call)
        if is_known:
            return output
        if member_of_thread is not None:
            thread = self._threads[member - 1]
            output = thread.pause((name, call))
        elif member == 0:
            output = self._meet(name, call)
        else:
            output = _ALONE
        if output is _ALONE:
            return network.alone(member, call)
        return output

    def _compute_early(self, name: str, call: Call) -> tuple[bool, Any]:
        """Return whether a call of the first member was computed for all members before they make it, and its output.

        Args:
            name: The network.
            call: The arguments, which must be parts of the batch.
        """
        if self._has_begun or self._early_failures[name] >= _MOST_EARLY_FAILURES:
            return False, None
        try:
            tree, (tensors,) = taken_apart([call])
            tensors_of_members = parts_of_batches(tensors, self._batches)
            if tensors_of_members is None:
                return False, None
            with self._without_logs():
                early = EarlyCall(self._calls[name], tree, tensors_of_members, self._randomness)
        except NotBatchable:
            # The call may still be computed together where all members wait for it.
            self._early_failures[name] += 1
            return False, None
        self.has_batched = True
        self._early.append(early)
        return True, early.take_first()

    def _take(self, member: int, name: str, call: Call) -> tuple[bool, Any]:
        """Return whether a call of another member is the next one that was computed early, and its output."""
        made = self._made[member]
        if made < len(self._early):
            early = self._early[made]
            if early.network.name == name:
                is_same, output = early.take(member, call)
                if is_same:
                    self._made[member] += 1
                    return True, output
            self._put_back(member)
        return False, None

    def _put_back(self, member: int) -> None:
        """Undo the early calls that a member has not made, which it computes by itself from now on."""
        for early in reversed(self._early[self._made[member] :]):
            early.put_back(member)
            self._early_failures[early.network.name] += 1
        self._made[member] = len(self._early)

    def _meet(self, name: str, call: Call) -> Any:
        """Bring all other steps to their next calls, compute them with that of the first member, and return its output.

        Args:
            name: The network that the first member calls.
            call: Its arguments.
        """
        # 1. The others arrive. Those that wait since the last call get its output first.
        if not self._has_begun:
            self._begin()
        calls = [call]
        for thread in self._threads:
            arguments = _call_of(thread, name)
            if arguments is None:
                return self._let_others_go(_ALONE, name)
            calls.append(arguments)

        # 2. All calls together.
        network = self._calls[name]
        try:
            tree, tensors = taken_apart(calls)
            with self._without_logs():
                outputs = network(tree, tensors, self._randomness)
        except NotBatchable as error:
            self._note_failure(name, error)
            return self._let_others_go(_ALONE, name)
        self.has_batched = True
        for thread, output in zip(self._threads, outputs[1:], strict=True):
            thread.resume(output)
        return outputs[0]

    def _let_others_go(self, reply: Any, name: str) -> Any:
        """Let the steps that wait with a call of the same network continue to their next calls."""
        for thread in self._threads:
            if _call_of(thread, name) is not None:
                thread.resume(reply)
        return reply

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

    def _note_failure(self, name: str, error: NotBatchable) -> None:
        """Note a call that could not be computed together. One whose reason may pass is tried again."""
        self._failures[name] += 1
        if not error.passes or self._failures[name] >= _MOST_FAILURES:
            self._note_reason(name, str(error))

    def _note_reason(self, name: str, reason: str) -> None:
        """Note that a network is computed member by member from now on."""
        self.reasons[name] = reason
        title = name or "The module"
        rank_zero_info(f"{title} is computed member by member: {reason}.")


def _call_of(thread: StepThread, name: str) -> Call | None:
    """Return the arguments with which a step waits for a network; None if it waits for another one, or has ended."""
    if thread.call is None:
        return None
    network, arguments = thread.call
    if network != name:
        return None
    call: Call = arguments
    return call


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
    module_of_forward = type(module).forward.__module__
    return not module_of_forward.startswith(("lightning.", "pytorch_lightning."))


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
