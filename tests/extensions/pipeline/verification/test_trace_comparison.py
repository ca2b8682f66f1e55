"""Each trace of a forward is compared with it: a wrong branch is refused, or the submodule that has it stays whole."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import ConfigurationError
from equipoise.extensions.pipeline import checked_traces
from equipoise.extensions.pipeline.recording import tracing
from tests.support.batches import CLASSES
from tests.support.networks.transparency import Base, Mlp
from tests.support.one_device import assert_same_run
from tests.support.pipelines import fit, pipelined

SIZES = [13, 5]


class Asking(nn.Module):
    """Computes something else where a value is not what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(30, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def answer(self, x: Tensor) -> bool:
        raise NotImplementedError

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features.flatten(1))
        if self.answer(hidden):
            hidden = hidden * 3
        return self.last(torch.relu(self.second(hidden)))


class Asked(Base):
    """Its network is a child, called by the step."""

    def __init__(self, network: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = network()

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["features"]), batch["label"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


class Around(nn.Module):
    """Has a network as a submodule."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.asking, self.after = nn.Linear(30, 30), inner, nn.Linear(CLASSES, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.after(self.asking(self.before(features.flatten(1))))


class OnlyInEvaluation(Asking):
    def answer(self, x: Tensor) -> bool:
        return not self.training


class Switching(Asked):
    """Trains its network in evaluation mode from the second batch on."""

    def __init__(self) -> None:
        super().__init__(OnlyInEvaluation)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net.train(batch_idx == 0)
        return super().training_step(batch, batch_idx)


def test_another_mode_is_another_trace():
    assert_same_run(fit(Switching, SIZES), fit(Switching, SIZES, **pipelined(2)))


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


def test_a_wrong_trace_of_the_network_is_refused(monkeypatch):
    network = wrong_where_recorded(monkeypatch)
    with pytest.raises(ConfigurationError, match="computes something else than the forward itself") as raised:
        fit(lambda: Asked(network), SIZES, **pipelined(2, micro_batches=2))
    told = str(raised.value)
    assert "Recorded cannot be cut into stages" in told
    assert re.search(r"The forward continues with Asking.forward, line \d+: `hidden = hidden \* 3`", told)
    assert re.search(r"what was followed continues with Asking.forward, line \d+: `return self.last\(", told)


def test_a_submodule_whose_trace_is_wrong_stays_whole(monkeypatch):
    question = wrong_where_recorded(monkeypatch)

    def make() -> Asked:
        return Asked(lambda: Around(question()))

    assert_same_run(fit(make, SIZES), fit(make, SIZES, **pipelined(2, micro_batches=2)))


class Noisy(Mlp):
    """Draws from the system, so it never computes the same twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(Noise())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator()
        generator.seed()
        return x + 0.1 * torch.randn(x.shape, generator=generator) if bool(x.isfinite().all()) else x


def test_a_forward_that_differs_from_itself_is_not_refused():
    """It may be right, but nobody can tell. One warning says so, though calls are followed in both modes."""
    with pytest.warns(UserWarning, match="Noisy computes something else when it is called again") as caught:
        _, gradients, _ = fit(Noisy, SIZES, val=[4], **pipelined(2, micro_batches=2))
    assert gradients
    assert len(caught) == 1


class Counting(nn.Module):
    """Counts its calls; is one block."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


class Counted(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(30, 8), nn.BatchNorm1d(8), nn.Dropout(), Counting(), nn.Linear(8, CLASSES)
        )


@pytest.mark.parametrize("options", [{}, {"cut_before": ["net.4"]}])
def test_the_comparison_leaves_no_trace(options):
    """Neither in buffers nor in random numbers."""
    module, _, _ = fit(Counted, SIZES, **pipelined(2, micro_batches=2, **options))
    assert module.net[4].calls == 2 * 2 * len(SIZES)
    assert module.net[2].num_batches_tracked == 2 * 2 * len(SIZES)
    again, _, _ = fit(Counted, SIZES, **pipelined(2, micro_batches=2, cut_before=["net.4"]))
    torch.testing.assert_close(dict(again.state_dict()), dict(module.state_dict()), rtol=1e-9, atol=1e-12)


class Forces(nn.Module):
    """Goes backward by itself, as models of energies do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(30, 30)

    def forward(self, x: Tensor) -> Tensor:
        assert bool(x.isfinite().all())
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(torch.tanh(self.layer(given)).sum(), given, create_graph=True)
        return x + force


class Energy(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), Forces(), nn.Linear(30, CLASSES))


def test_a_forward_that_goes_backward_by_itself():
    assert_same_run(fit(Energy, SIZES), fit(Energy, SIZES, **pipelined(2, micro_batches=2)))
