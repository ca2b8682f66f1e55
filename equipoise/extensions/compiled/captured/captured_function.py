"""The program of a step, traced by torch's compiler, and its graphs captured as CUDA graphs."""

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from equipoise.extensions.compiled.captured.captured_graph import CapturedGraph, GraphPool
from equipoise.extensions.compiled.interop.compiling import CompiledFunction, NotedInputs

__all__ = ["CapturedFunction"]


class CapturedFunction(CompiledFunction):
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
        self._gradients = gradients
        self._graphs: list[CapturedGraph] = []

        def lower(graph: Any, noted: NotedInputs) -> Callable[..., Any]:
            captured = CapturedGraph(graph, noted, pool, passing)
            self._graphs.append(captured)
            return captured

        # A number that changes is not an input: a replay would not read it.
        super().__init__(function, own_attributes, lower=lower, dynamic=False)

    def __call__(self, *args: Any) -> Any:
        """Call the function by a graph that exists; see `CompiledFunction.__call__`."""
        for graph in self._graphs:
            graph.obstacle = None
        return super().__call__(*args)

    def compile(self, *args: Any) -> Any:
        """Call the function, and capture a graph; see `CompiledFunction.compile`."""
        result = super().compile(*args)
        gradients = self._gradients()
        for graph in self._graphs:
            graph.keep_only(gradients)
        return result

    def obstacle(self) -> str | None:
        """Return the reason for which a graph was not replayed in the last call, although its conditions hold."""
        return next((graph.obstacle for graph in self._graphs if graph.obstacle is not None), None)

    def release(self) -> None:
        """Release the memory of the graphs. The next call needs a new capture."""
        for graph in self._graphs:
            graph.release()

    def close(self) -> None:
        """Release the graphs and all that they refer to."""
        self.release()
        self._graphs.clear()
        super().close()
