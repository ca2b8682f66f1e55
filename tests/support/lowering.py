"""Compiled steps without the backend: graphs run as torch has traced them, which takes a fraction of a second."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from equipoise.extensions.compiled.interop import compiling

__all__ = ["Lowering", "lowering"]


class Lowering:
    """Stands in for the backend.

    Attributes:
        graphs: Number of graphs that were traced.
        calls: Number of times that a traced graph has run.
        around: Called before each run of a graph, with its number.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self.calls = 0
        self.around: Callable[[int], None] | None = None

    def __call__(self, graph: Any, inputs: Any, *options: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            if self.around is not None:
                self.around(self.calls)
            return graph.forward(*args)

        return run


@pytest.fixture
def lowering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lowering]:
    """Replace the backend, and forget what was traced."""
    lowering = Lowering()
    monkeypatch.setattr(compiling, "_lower", lowering)
    yield lowering
    torch.compiler.reset()
