"""The members' steps side by side: they meet where they call a network, which is computed once for all of them.

    member 0    training_step ──> net(x) ─┐              ┌─> loss       the calling thread
    member 1    training_step ──> net(x) ─┼─> one vmap ──┼─> loss       a thread that waits at the call
    member 2    training_step ──> net(x) ─┘              └─> loss

Everything else in a step runs once for each member, unchanged. A call that others do not make, too, is computed by the
member alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any, TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torchmetrics import Metric, MetricCollection

from equipoise.extensions.ensemble.computation.anticipation import AnticipatedCalls, Anticipation
from equipoise.extensions.ensemble.computation.batched_call import (
    BatchedCall,
    Call,
    Computing,
    NotBatchable,
    reason_against,
)
from equipoise.extensions.ensemble.computation.member_threads import MemberThread
from equipoise.extensions.ensemble.members.stacked_members import StackedMembers
from equipoise.interop.torch.modules import children_of
from equipoise.parallel.replicas.device_threads import ThreadState

__all__ = ["SideBySide"]

T = TypeVar("T")

# Failures after which a network is computed member by member.
_MOST_FAILURES = 8
# Answers a thread that is to compute the call by itself.
_ALONE: Any = object()


class SideBySide:
    """Runs the steps of all members.

    Args:
        members: The members.
        forward_context: Function that returns the context of the precision; None if there is none.
        allows_randomness: Whether networks that draw random numbers may be computed together.

    Attributes:
        reasons: Why networks are computed member by member, by their names.
        has_batched: True if a call of the last steps was computed together.
    """

    def __init__(
        self,
        members: StackedMembers,
        forward_context: Callable[[], AbstractContextManager[Any]] | None,
        *,
        allows_randomness: bool,
    ) -> None:
        self._members = members
        self._module = members.modules[0]
        self._randomness = "different" if allows_randomness else "error"
        self._forward_context = nullcontext if forward_context is None else forward_context
        # 1. The threads, and the step that they run.
        self._threads: list[MemberThread] = []
        self._by_ident: dict[int, MemberThread] = {}
        self._steps: Sequence[Callable[[], Any]] = ()
        self._has_begun = False
        # The calls that all members have made together.
        self._met: list[tuple[str, list[Call]]] = []
        # 2. Calls that are known before.
        self._anticipation = Anticipation()
        self._anticipated: AnticipatedCalls | None = None
        self._compared_with: AnticipatedCalls | None = None
        self._member = 0
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
        self._interceptors = {name: self._interceptor(name) for name in self._calls}

    def run(self, steps: Sequence[Callable[[], T]], batches: Sequence[Any]) -> list[T]:
        """Run a step of each member and return the results in order.

        Args:
            steps: The steps.
            batches: The batch of each member.

        Raises:
            BaseException: The first error of a step. The others are ended.
        """
        self.has_batched = False
        self._met = []
        with self._intercepted():
            self._members.refresh()
            anticipated = self._anticipate(batches)
            if anticipated is not None and self._anticipation.is_trusted:
                return self._run_in_turn(steps, anticipated)
            results = self._run_in_threads(steps, anticipated)
        if anticipated is None:
            self._anticipation.observe(self._met, batches)
        return results

    def _run_in_turn(self, steps: Sequence[Callable[[], T]], anticipated: AnticipatedCalls) -> list[T]:
        """Run one step after the other, with the outputs of a network that was computed before."""
        self.has_batched = True
        self._anticipated = anticipated
        results = []
        try:
            for member, step in enumerate(steps):
                self._member = member
                results.append(step())
                if anticipated.put_back(member):
                    self._anticipation.fail()
        finally:
            self._anticipated = None
            self._member = 0
        return results

    def _run_in_threads(self, steps: Sequence[Callable[[], T]], anticipated: AnticipatedCalls | None) -> list[T]:
        """Run the steps up to their calls, which are computed together, and on to their ends."""
        if not self._threads:
            self._threads = [MemberThread(member) for member in range(1, len(steps))]
            self._by_ident = {thread.ident: thread for thread in self._threads}
        self._state = ThreadState.capture(("cpu", "cuda"))
        self._steps = steps
        self._has_begun = False
        self._compared_with = anticipated
        try:
            first = steps[0]()
            # The others may make calls that the first does not make.
            if not self._has_begun:
                self._begin()
            self._finish()
            return [first] + [thread.take_result() for thread in self._threads]
        except BaseException:
            for thread in self._threads:
                thread.abandon()
            raise
        finally:
            self._steps = ()
            self._compared_with = None

    # Anticipation.

    def _anticipate(self, batches: Sequence[Any]) -> AnticipatedCalls | None:
        """Compute the call that the members will make, if it is known."""
        pattern = self._anticipation.pattern
        if pattern is None or pattern.name in self.reasons:
            return None
        tensors = pattern.tensors(batches)
        if tensors is None:
            return None
        network = self._calls[pattern.name]
        try:
            with self._without_logs(), self._forward_context():
                anticipated = AnticipatedCalls(network, pattern, tensors, self._randomness)
        except NotBatchable:
            # The members may not make the call after all.
            self._anticipation.fail()
            return None
        if not self._anticipation.is_trusted:
            # The call itself comes, too.
            anticipated.put_back_all()
        return anticipated

    def _compare(self, outputs: Sequence[Any]) -> None:
        """Compare the outputs of a call with those that were anticipated."""
        if self._compared_with is None:
            return
        if self._compared_with.are_equal_to(outputs):
            self._anticipation.agree()
        else:
            self._anticipation.fail()

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
        for thread in self._threads:
            thread.start(self._steps[thread.member], self._state)

    def _finish(self) -> None:
        """Run all other steps to their ends."""
        for thread in self._threads:
            while thread.is_busy:
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
        thread = self._by_ident.get(get_ident())
        member = self._member if thread is None else thread.member
        if name in self.reasons:
            # Its parts may meet.
            return network.forward_of(member, call)
        if self._anticipated is not None:
            return self._take(name, call)
        if thread is None:
            reply = self._meet(name, call)
        else:
            reply = thread.pause((name, call))
        if reply is _ALONE:
            return network.alone(member, call)
        return reply

    def _take(self, name: str, call: Call) -> Any:
        """Return the output of a call that was anticipated, or compute another one."""
        anticipated = self._anticipated
        member = self._member
        assert anticipated is not None
        if name == anticipated.network.name:
            is_anticipated, output = anticipated.take(member, call)
            if is_anticipated:
                return output
        anticipated.put_back(member)
        self._anticipation.fail()
        return self._calls[name].alone(member, call)

    def _meet(self, name: str, call: Call) -> Any:
        """Bring all other steps to their next calls, compute them with that of the first member, and return its output.

        Args:
            name: The network that the first member calls.
            call: Its arguments.
        """
        # 1. The others arrive. Those that wait since the last call get its output first.
        if not self._has_begun:
            self._begin()
        waiting = [thread.call for thread in self._threads]
        if any(other is None or other[0] != name for other in waiting):
            return self._let_others_go(_ALONE, name)

        # 2. All calls together.
        calls = [call] + [arguments for _, arguments in waiting]
        try:
            with self._without_logs():
                outputs = self._calls[name](calls, self._randomness)
        except NotBatchable as error:
            self._note_failure(name, error)
            return self._let_others_go(_ALONE, name)
        self.has_batched = True
        self._met.append((name, calls))
        self._compare(outputs)
        for thread, output in zip(self._threads, outputs[1:], strict=True):
            thread.resume(output)
        return outputs[0]

    def _let_others_go(self, reply: Any, name: str) -> Any:
        """Let the steps that wait with a call of the same network continue to their next calls."""
        for thread in self._threads:
            if thread.call is not None and thread.call[0] == name:
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
        rank_zero_info(f"{name or 'The module'} is computed member by member: {reason}.")


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
