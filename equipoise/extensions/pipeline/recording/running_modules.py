"""The modules whose forward is running while it is recorded, and the obstacles in them."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.forward.operation_traits import Traits
from equipoise.extensions.pipeline.forward.user_lines import line_of_user

__all__ = ["RunningModule", "RunningModules"]


@dataclass
class RunningModule:
    """A module whose forward is running.

    Attributes:
        module: The module.
        call_count: Number of calls before it.
        question_count: Number of questions before it.
        followed_count: Number of modules before it whose calls were recorded.
        arguments: Its arguments that are values of calls, and these calls.
        traits: Traits of the operations that it has run.
        obstacle: Reason why its calls alone would not be its forward; empty if there is none.
    """

    module: nn.Module
    call_count: int
    question_count: int
    followed_count: int
    arguments: Sequence[tuple[Tensor, fx.Node]]
    traits: Traits = field(default_factory=lambda: Traits(0))
    obstacle: str = ""

    def note_obstacle(self, reason: str) -> None:
        """Note a reason why its calls alone would not be its forward. The first one counts."""
        if not self.obstacle:
            self.obstacle = reason


class RunningModules:
    """The modules whose forward is running, the outermost first.

    Args:
        root: Module to which paths refer.
        network: Its submodule whose forward runs.
        call_count: Number of calls before that forward.
    """

    def __init__(self, root: nn.Module, network: nn.Module, call_count: int) -> None:
        self._paths = _paths_of_modules(root)
        running_network = RunningModule(network, call_count, 0, 0, ())
        self._stack = [running_network]

    @property
    def network(self) -> RunningModule:
        """The network itself."""
        return self._stack[0]

    @property
    def innermost(self) -> RunningModule:
        """The module whose code runs now."""
        return self._stack[-1]

    def path_of(self, module: nn.Module) -> str | None:
        """Return the path of a module in the root; None if it is none of its submodules."""
        return self._paths.get(id(module))

    def push(self, running: RunningModule) -> None:
        """Note that the forward of a module begins."""
        self._stack.append(running)

    def pop(self) -> None:
        """Note that the innermost forward has ended."""
        self._stack.pop()

    def place(self) -> dict[str, type[nn.Module]]:
        """Return the classes of the running modules by their paths, without the network."""
        place = {}
        for running in self._stack[1:]:
            path = self._paths[id(running.module)]
            place[path] = type(running.module)
        return place

    def note_traits(self, traits: Traits) -> None:
        """Note traits of an operation that runs now."""
        for running in self._stack:
            running.traits |= traits

    def note_obstacle(self, reason: str) -> None:
        """Note that the calls of the innermost module would not be its forward. The first reason counts."""
        line = line_of_user(inspect.currentframe())
        if line:
            reason = f"{line} ({reason})"
        self.innermost.note_obstacle(reason)


def _paths_of_modules(root: nn.Module) -> dict[int, str]:
    """Return the first path of each module, by its id."""
    paths: dict[int, str] = {}
    for path, module in root.named_modules():
        paths.setdefault(id(module), path)
    return paths
