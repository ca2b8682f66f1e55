"""Each trace of a forward is compared with it: a wrong branch is refused, or the submodule that has it stays whole."""

import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import ConfigurationError
from equipoise.extensions.pipeline import checked_traces
from equipoise.extensions.pipeline.recording import tracing
from equipoise.extensions.pipeline.verification.output_comparison import Output
from tests.support.batches import CLASSES
from tests.support.equality import assert_equal
from tests.support.networks.layers import WIDTH, Task, layers, network
from tests.support.pipelines import assert_as_on_one_device, fit, pipelined

SIZES = [13, 5]


class Asking(nn.Module):
    """Computes something else where a value is not what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def answer(self, x: Tensor) -> bool:
        raise NotImplementedError

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features.flatten(1))
        if self.answer(hidden):
            hidden = hidden * 3
        return self.last(torch.relu(self.second(hidden)))


def around(inner: nn.Module) -> nn.Module:
    """Has a network as a submodule."""

    def forward(self: Any, features: Tensor) -> Tensor:
        return self.after(self.asking(self.before(features.flatten(1))))

    return network(forward, before=nn.Linear(WIDTH, WIDTH), asking=inner, after=nn.Linear(CLASSES, CLASSES))


class OnlyInEvaluation(Asking):
    def answer(self, x: Tensor) -> bool:
        return not self.training


class Switching(Task):
    """Trains its network in evaluation mode from the second batch on."""

    def __init__(self) -> None:
        super().__init__(OnlyInEvaluation())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net.train(batch_idx == 0)
        return super().training_step(batch, batch_idx)


def test_another_mode_is_another_trace():
    assert_as_on_one_device(Switching, pipelined(2))


# What a recording cannot know: something outside of the module that changes from call to call.


def wrong_where_recorded(monkeypatch: pytest.MonkeyPatch) -> type[Asking]:
    """Return a network whose recorded calls leave out a line."""
    recording = threading.Event()

    def trace(*args: Any, **kwargs: Any) -> Any:
        recording.set()
        try:
            return tracing.trace(*args, **kwargs)
        finally:
            recording.clear()

    monkeypatch.setattr(checked_traces, "trace", trace)

    class Recorded(Asking):
        def answer(self, x: Tensor) -> bool:
            return not recording.is_set()

    return Recorded


def calls_its_child(module: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(module.net(batch["features"]), batch["label"])


def test_a_wrong_trace_of_the_network_is_refused(monkeypatch):
    question = wrong_where_recorded(monkeypatch)
    with pytest.raises(ConfigurationError, match="computes something else than the forward itself") as raised:
        fit(lambda: Task(question(), calls_its_child), **pipelined(2, micro_batches=2))
    told = str(raised.value)
    assert "Recorded cannot be cut into stages" in told
    assert re.search(r"The forward continues with Asking.forward, line \d+: `hidden = hidden \* 3`", told)
    assert re.search(r"what was followed continues with Asking.forward, line \d+: `return self.last\(", told)


def test_a_submodule_whose_trace_is_wrong_stays_whole(monkeypatch):
    question = wrong_where_recorded(monkeypatch)

    assert_as_on_one_device(lambda: Task(around(question())), pipelined(2, micro_batches=2))


def test_equal_values_of_other_graphs_differ():
    x = torch.ones(3, requires_grad=True)
    one, again, other = (Output(value.exp(), with_graph=True) for value in (x * 1, x * 1, x + 0))
    assert one.agrees(again)
    assert not one.agrees(other)


def adds_noise(self: Any, x: Tensor) -> Tensor:
    """Draw from the system, so never compute the same twice."""
    generator = torch.Generator()
    generator.seed()
    return x + 0.1 * torch.randn(x.shape, generator=generator) if bool(x.isfinite().all()) else x


def test_a_forward_that_differs_from_itself_is_not_refused():
    """It may be right, but nobody can tell. One warning says so, though calls are followed in both modes."""
    with pytest.warns(UserWarning, match="Task computes something else when it is called again") as caught:
        run = fit(lambda: layers(network(adds_noise)), SIZES, val=[4], **pipelined(2, micro_batches=2))
    assert run.gradients
    assert len(caught) == 1


def counts(self: Any, x: Tensor) -> Tensor:
    """Count the calls, as one block."""
    self.calls += 1
    return self.layer(x)


def counted() -> Task:
    block = network(counts, layer=nn.Linear(WIDTH, WIDTH))
    block.register_buffer("calls", torch.zeros(()))
    return layers(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(), block)


@pytest.mark.parametrize("options", [{}, {"cut_before": ["net.4"]}])
def test_the_comparison_leaves_no_trace(options):
    """Neither in buffers nor in random numbers."""
    module, _, _ = fit(counted, SIZES, **pipelined(2, micro_batches=2, **options))
    assert module.net[4].calls == 2 * 2 * len(SIZES)
    assert module.net[2].num_batches_tracked == 2 * 2 * len(SIZES)
    again, _, _ = fit(counted, SIZES, **pipelined(2, micro_batches=2, cut_before=["net.4"]))
    assert_equal(module, again, 1e-9)
