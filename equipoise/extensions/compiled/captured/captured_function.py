"""The program of a step, traced by torch's compiler, and its graphs captured as CUDA graphs."""

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from equipoise.extensions.compiled.captured.captured_graph import CapturedGraph, GraphPool
from equipoise.interop.torch.compiling import CompiledFunction, NotedInputs

__all__ = ["CapturedFunction"]


class CapturedFunction:
    """A function whose graphs are replayed; see `CompiledFunction`, which traces it and knows its conditions.

    Args:
        function: The function. It may run a backward, which writes gradients into parameters.
        own_attributes: Names of attributes that the function may change on the object whose method it is.
        pool: The stream and the memory pool of all graphs of the run.
        passing: Returns the tensors of the present step that are others in the next one, such as the batch.
        gradients: Returns the gradients of all parameters. The function writes them into memory that stays the same.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        own_attributes: Collection[str],
        *,
        pool: GraphPool,
        passing: Callable[[], Collection[Tensor]],
        gradients: Callable[[], Collection[Tensor]],
    ) -> None:
        self._pool = pool
        self._passing = passing
        self._gradients = gradients
        self._graphs: list[CapturedGraph] = []
        # A number that changes is not an input: a replay would not read it.
        self._function = CompiledFunction(function, own_attributes, lower=self._lower, dynamic=False)

    def __call__(self, *args: Any) -> Any:
        """Call the function by a graph that exists.

        Raises:
            NewVariant: If none fits. Nothing was computed then.
        """
        for graph in self._graphs:
            graph.obstacle = None
        return self._function(*args)

    def compile(self, *args: Any) -> Any:
        """Call the function, and capture a graph. `restore` undoes what the call has changed.

        Raises:
            CompilerError: If the function cannot be traced or captured, or its Python code changes an object.
        """
        result = self._function.compile(*args)
        gradients = self._gradients()
        for graph in self._graphs:
            graph.keep_only(gradients)
        return result

    def unmet_conditions(self, *args: Any) -> list[str]:
        """Return the conditions of the graphs that do not hold for these arguments."""
        return self._function.unmet_conditions(*args)

    def obstacle(self) -> str | None:
        """Return the reason for which a graph was not replayed in the last call, although its conditions hold."""
        obstacles = [graph.obstacle for graph in self._graphs if graph.obstacle is not None]
        return obstacles[0] if obstacles else None

    def leaves(self) -> list[Tensor]:
        """Return the tensors that have received a gradient in the last call of `compile`."""
        return self._function.leaves()

    def changed(self) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors that the last call of `compile` has changed, and copies of their present values."""
        return self._function.changed()

    def restore(self) -> None:
        """Restore the tensors that the last call of `compile` has changed, and their gradients."""
        self._function.restore()

    def release(self) -> None:
        """Release the memory of the graphs. The next call needs a new capture."""
        for graph in self._graphs:
            graph.release()

    def close(self) -> None:
        """Release the graphs and all that they refer to."""
        self.release()
        self._graphs.clear()
        self._function.close()

    def _lower(self, graph: Any, noted: NotedInputs) -> Callable[..., Any]:
        captured = CapturedGraph(graph, noted, self._pool, self._passing)
        self._graphs.append(captured)
        return captured
