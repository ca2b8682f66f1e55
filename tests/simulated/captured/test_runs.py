"""Runs with captured steps: their launches, their memory, and errors in them."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from equipoise import OOMRecovery
from equipoise.extensions.compiled.captured import captured_graph
from tests.simulated.captured.capturing import STAYS_EAGER, Graphs, assert_same, fit
from tests.simulated.devices.graphs import num_graphs
from tests.simulated.devices.installation import extension
from tests.simulated.steps.launches import Launches
from tests.support.pipelines import quiet
from tests.support.step_networks import SIZES, Network, batches

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    yield
    extension().record_launches(False)
    extension().take_launches()


# Launches


def launched(capture: bool, **options: Any) -> Counter[str]:
    """Return the operations of the last step of a fit."""
    launches = Launches()
    trainer = quiet(
        accelerator="cuda", devices=[0], strategy="single_device", callbacks=[launches], capture=capture, **options
    )
    trainer.fit(Network(), batches([5] * 8))
    return launches.of_steps[-1][0]


def test_a_replayed_step_is_one_launch() -> None:
    """Beside it, the batch is copied into the graph, the results out of it, and the optimiser steps."""
    eager = launched(capture=False)
    captured = launched(capture=True)
    assert captured["CUDAGraph.replay"] == 1
    # The batch has two dtypes, and the results have one.
    assert captured["aten::_foreach_copy_"] == 3
    # The copy of the batch to the device, the optimiser's step and the logs are as in an eager step.
    others = captured - Counter({"CUDAGraph.replay": 1, "aten::_foreach_copy_": 3})
    assert not others - eager, others
    of_step = {name for name in eager if "backward" in name or "loss" in name or name.endswith("mm")}
    assert len(of_step) >= 5
    assert not of_step & set(others)
    assert others.total() == 10
    assert eager.total() == 36


# Memory


def test_a_run_leaves_nothing_in_memory() -> None:
    def allocated(capture: bool) -> int:
        gc.collect()
        before = extension().allocated_bytes(0)
        result = fit(Network, [5] * 8, capture=capture)
        assert bool(result.replays) is capture
        module = weakref.ref(result.module)
        trainer = weakref.ref(result.module.trainer)
        del result
        gc.collect()
        assert [module(), trainer()] == [None, None]
        return int(extension().allocated_bytes(0) - before)

    assert allocated(capture=False) == 0
    assert allocated(capture=True) == 0


class Wide(Network):
    """Needs memory for its batch, and draws no random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 2000), nn.Tanh(), nn.Linear(2000, 3))


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """A function that limits the memory of the device to so many bytes more than it holds."""
    yield lambda more: extension().set_limit(0, extension().allocated_bytes(0) + more)
    extension().set_limit(0, 0)


class Limits(L.Callback):
    """Limits the memory after so many steps.

    Args:
        limit: Limits the memory to so many bytes more than are allocated.
        step: The number of the step.
        more: The bytes; 0: a few more than the step has needed.
    """

    def __init__(self, limit: Callable[[int], None], step: int, more: int = 0) -> None:
        self.limit = limit
        self.more = more
        self.step = step
        self.held: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        extension().reset_peak(0)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        held = extension().allocated_bytes(0)
        self.held.append(held)
        if trainer.global_step == self.step:
            self.limit(self.more or extension().peak_bytes(0) - held + 50_000)


def test_graphs_are_released_after_an_error_of_memory(limited: Callable[[int], None]) -> None:
    """The eager batch of another shape does not fit beside them, and then fits in parts."""
    sizes = [20] * 6 + [90, 20, 20, 20, 20, 20]
    eager = fit(Wide, sizes, max_epochs=1)
    graphs: list[int] = []
    limits = Limits(limited, 6, 3 * MIB)

    class Notes(OOMRecovery):
        def on_out_of_memory(self, trainer: Any, module: Any, event: Any) -> Any:
            graphs.append(num_graphs())
            return super().on_out_of_memory(trainer, module, event)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            graphs.append(num_graphs())

    with pytest.warns(UserWarning, match="memory"):
        captured = fit(Wide, sizes, max_epochs=1, capture=True, callbacks=lambda: [Notes(), limits])
    # One graph from the third batch on, until memory runs out; and again from a trial on.
    before = graphs[0]
    assert graphs[2:7] == [before + 1] * 5
    assert graphs[7] == before
    assert graphs[-1] == before + 1
    for one, other in zip(captured.module.parameters(), eager.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    # Four replays before the error: that of the trial among them. Afterwards the shape is tried again.
    assert captured.replays > 4


def test_too_little_memory_for_a_trial(limited: Callable[[int], None]) -> None:
    sizes = [40] * 8
    eager = fit(Wide, sizes, max_epochs=1)
    # As much as an eager step needs, and not a copy of the parameters beside it.
    limits = Limits(limited, 2)
    with pytest.warns(UserWarning, match=f"{STAYS_EAGER} there is not enough memory to compare it with a captured one"):
        captured = fit(Wide, sizes, max_epochs=1, capture=True, callbacks=lambda: [limits])
    assert_same(captured, eager)
    assert not captured.replays
    # What the failed trial has allocated is free again.
    assert limits.held[-1] <= limits.held[1] + 1000


# Trials


def test_a_capture_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a kernel computed something else in a graph, which is released then."""
    replay = captured_graph._replay

    def differing(capture: Any, inputs: Any) -> Any:
        outputs = replay(capture, inputs)
        for output in outputs:
            if isinstance(output, Tensor) and output.is_floating_point() and output.ndim == 2:
                output.mul_(1 + 1e-15)
        return outputs

    eager = fit(Network)
    monkeypatch.setattr(captured_graph, "_replay", differing)
    graphs = Graphs()
    with pytest.warns(UserWarning, match=f"{STAYS_EAGER} a captured one differs: the gradient of net.0.weight"):
        captured = fit(Network, capture=True, callbacks=[graphs])
    assert_same(captured, eager)
    assert captured.replays == 1
    assert graphs.more == [0] * 2 * len(SIZES)


def test_a_capture_that_fails_is_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA may be in disorder after it."""

    capture_end = torch.cuda.CUDAGraph.capture_end

    def fail(graph: torch.cuda.CUDAGraph) -> None:
        capture_end(graph)
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", fail)
    eager = fit(Network, [5, 4, 5, 4] * 3, max_epochs=1)
    with pytest.warns(UserWarning, match=STAYS_EAGER) as warned:
        captured = fit(Network, [5, 4, 5, 4] * 3, max_epochs=1, capture=True)
    texts = [str(warning.message) for warning in warned]
    assert any("a captured one ends with an error (RuntimeError: CUDA error" in text for text in texts)
    assert any("an earlier capture has failed" in text for text in texts)
    assert_same(captured, eager)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


class ReturningTensors(Network):
    """Returns tensors of its own, which change with the next steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        return {**result, "weight": self.net[0].weight, "mean": self.net[1].running_mean, "part": self.net[0].bias[:2]}


class Notes(L.Callback):
    """Notes outputs after the step of the optimiser, and those of the step before."""

    def __init__(self) -> None:
        self.outputs: Any = {}
        self.values: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for noted in (self.outputs, outputs):
            self.values.append({name: value.detach().clone() for name, value in noted.items()})
        self.outputs = outputs


def test_outputs_in_memory_of_the_module() -> None:
    eager, captured = Notes(), Notes()
    fit(ReturningTensors, callbacks=[eager])
    result = fit(ReturningTensors, capture=True, callbacks=[captured])
    assert result.replays == 13
    torch.testing.assert_close(captured.values, eager.values, rtol=0, atol=0)


# Refusals


def test_recomputed_activations_keep_a_step_eager() -> None:
    options: Any = {"max_epochs": 1, "activation_checkpointing": ["net.2"]}
    eager = fit(Network, **options)
    with pytest.warns(UserWarning, match=f"{STAYS_EAGER} Unsupported function call"):
        captured = fit(Network, capture=True, **options)
    assert_same(captured, eager)
    assert not captured.replays
