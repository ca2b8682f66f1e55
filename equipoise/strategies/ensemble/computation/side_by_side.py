"""The members' steps side by side: they meet where they call a network, which is computed once for all of them.

    member 0    training_step ──> net(x) ─┐              ┌─> loss       the calling thread
    member 1    training_step ──> net(x) ─┼─> one vmap ──┼─> loss       a thread that waits at the call
    member 2    training_step ──> net(x) ─┘              └─> loss

Everything else in a step runs once for each member, unchanged. A call that others do not make, too, is computed by the
member alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torchmetrics import Metric, MetricCollection

from equipoise.interop.torch.modules import children_of
from equipoise.parallel.replicas.device_threads import ThreadState
from equipoise.strategies.ensemble.computation.batched_call import BatchedCall, Call, NotBatchable, reason_against
from equipoise.strategies.ensemble.computation.member_threads import MemberThread
from equipoise.strategies.ensemble.stacked_members import StackedMembers

__all__ = ["SideBySide"]

T = TypeVar("T")

# Answers a thread that is to compute the call by itself.
_ALONE: Any = object()


class SideBySide:
    """Runs the steps of all members.

    Args:
        members: The members.
        allows_randomness: Whether networks that draw random numbers may be computed at once.

    Attributes:
        reasons: Why networks are computed member by member, by their names.
        has_batched: True if a call of the last steps was computed at once.
    """

    def __init__(self, members: StackedMembers, *, allows_randomness: bool) -> None:
        self._members = members
        self._module = members.modules[0]
        self._randomness = "different" if allows_randomness else "error"
        self._threads: list[MemberThread] = []
        self._by_ident: dict[int, MemberThread] = {}
        self.reasons: dict[str, str] = {}
        self.has_batched = False
        self._calls: dict[str, BatchedCall] = {}
        for name in _networks(self._module):
            reason = reason_against(self._module.get_submodule(name))
            if reason:
                self._note_reason(name, reason)
            else:
                self._calls[name] = BatchedCall(name, members)
        # True while a network computes, whose own parts may be networks, too.
        self._is_inside = False

    def run(self, steps: Sequence[Callable[[], T]]) -> list[T]:
        """Run a step of each member and return the results in order.

        Args:
            steps: The steps.

        Raises:
            BaseException: The first error of a step. The others are ended.
        """
        self.has_batched = False
        if not self._threads:
            self._threads = [MemberThread(member) for member in range(1, len(steps))]
            self._by_ident = {thread.ident: thread for thread in self._threads}
        self._state = ThreadState.capture(("cpu", "cuda"))
        self._steps = steps
        self._has_begun = False
        try:
            with self._intercepted():
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
                for network in call.networks:
                    attributes = vars(network)
                    covered.append(attributes)
                    attributes["forward"] = self._interceptor(name)
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
        thread = self._by_ident.get(get_ident())
        member = 0 if thread is None else thread.member
        if self._is_inside:
            return self._calls[name].alone(member, call)
        answer = _ALONE
        if thread is not None:
            answer = thread.pause((name, call))
        else:
            answer = self._meet(name, call)
        if answer is not _ALONE:
            return answer
        with self._inside():
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
        if name in self.reasons or any(other is None or other[0] != name for other in waiting):
            return self._let_others_go(_ALONE, name)

        # 2. All calls at once.
        calls = [call] + [arguments for _, arguments in waiting]
        try:
            with self._inside(), self._without_logs():
                outputs = self._calls[name](calls, self._randomness)
        except NotBatchable as error:
            self._note_reason(name, str(error))
            return self._let_others_go(_ALONE, name)
        self.has_batched = True
        for thread, output in zip(self._threads, outputs[1:], strict=True):
            thread.resume(output)
        return outputs[0]

    def _let_others_go(self, answer: Any, name: str) -> Any:
        """Let the steps that wait with a call of the same network go on to their next calls."""
        for thread in self._threads:
            if thread.call is not None and thread.call[0] == name:
                thread.resume(answer)
        return answer

    @contextmanager
    def _inside(self) -> Iterator[None]:
        outer = self._is_inside
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = outer

    @contextmanager
    def _without_logs(self) -> Iterator[None]:
        """Let a forward that logs be computed member by member: its values would be of all members at once."""
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

    def _note_reason(self, name: str, reason: str) -> None:
        """Note that a network is computed member by member from now on."""
        self.reasons[name] = reason
        rank_zero_info(f"{name or 'The module'} is computed member by member: {reason}.")


def _networks(module: nn.Module) -> list[str]:
    """Return the names of the modules whose calls are computed at once: the module, and its children with parameters.

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
