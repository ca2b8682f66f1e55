"""Names of torch for graphs of simulated devices."""

from collections import Counter
from itertools import count
from typing import Any

import torch

from tests.simulated.devices.installation import extension

__all__ = ["CUDAGraph", "num_graphs", "replace_graphs"]

_pools = count(1)
# Number of graphs of each pool. A pool without graphs cannot be used again.
_graphs_of_pools: Counter[Any] = Counter()


class CUDAGraph:
    """A graph of a simulated device. Its memory is its own: pools count their graphs, and nothing else."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph: Any = None
        self._pool: Any = None

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        """Begin to record what the current stream computes."""
        if self._graph is not None:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        pool = pool or _graph_pool_handle()
        if pool in _graphs_of_pools and not _graphs_of_pools[pool]:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: all graphs of this pool are released")
        extension().begin_capture()
        _graphs_of_pools[pool] += 1
        self._pool = pool

    def capture_end(self) -> None:
        """End the capture."""
        self._graph = extension().end_capture()

    def replay(self) -> None:
        """Compute what was recorded, on the current stream."""
        if self._graph is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._graph.replay()

    def reset(self) -> None:
        """Release the graph and its memory."""
        self._graph = None
        if self._pool is not None:
            _graphs_of_pools[self._pool] -= 1
            self._pool = None

    def __del__(self) -> None:
        self.reset()

    def pool(self) -> Any:
        """Return the handle of the pool."""
        return self._pool


def num_graphs() -> int:
    """Return the number of captured graphs that are not released."""
    return _graphs_of_pools.total()


def replace_graphs() -> None:
    """Replace all names, for the life of this process."""
    module: Any = torch.cuda.graphs
    module.CUDAGraph = CUDAGraph
    torch.cuda.CUDAGraph = CUDAGraph  # type: ignore[assignment, misc]
    module._graph_pool_handle = _graph_pool_handle
    module._cuda_isCurrentStreamCapturing = _is_capturing
    private: Any = torch._C
    private._cuda_isCurrentStreamCapturing = _is_capturing
    private._host_emptyCache = lambda: None


def _graph_pool_handle() -> tuple[int, int]:
    return 0, next(_pools)


def _is_capturing() -> bool:
    return bool(extension().is_capturing())
