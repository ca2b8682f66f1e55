"""Differences of other calls are noticed: a recorded forward that no longer fits is recorded anew, or refused."""

import threading
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from equipoise import StepError
from equipoise.extensions.pipeline.recording.tracing import NotTraceable
from tests.support.networks.layers import network as written
from tests.support.traces import WIDTH, called, run, traced, values


def with_layer(forward: Any, **attributes: Any) -> nn.Module:
    """A network with this forward and one layer."""
    return written(forward, layer=nn.Linear(WIDTH, WIDTH), **attributes).double()


@pytest.mark.parametrize("divide", [lambda x: x.split(1, 1), lambda x: list(x.unbind(dim=1))])
def test_the_length_of_a_tuple_is_a_size(divide):
    def goes_through_steps(self: Any, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for part in divide(x):
            state = torch.tanh(self.layer(part.reshape(len(x), -1)) + state)
        return state

    network = with_layer(goes_through_steps)
    made = traced(network, values(2, 3, WIDTH))
    x = values(2, 3, WIDTH)
    assert made.fits([x])
    assert torch.equal(run(made, x), network(x))
    assert not made.fits([values(2, 5, WIDTH)])


@pytest.mark.parametrize("inference", [False, True])
def test_a_change_in_place_keeps_sizes(inference):
    """At places that depend on values."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.layer(x)
        y = torch.zeros_like(x)
        y[x > 0] = 1.0
        return x * y.shape[1] + y.sum()

    network = with_layer(forward)
    with torch.inference_mode(inference):
        made = traced(network, values(5, WIDTH))
        x = values(5, WIDTH)
        assert made.fits([x])
        assert torch.equal(run(made, x), network(x))
        assert not made.fits([values(4, WIDTH)])


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (lambda x: [x, x], lambda x: [x, x, x]),
        (lambda x: {"a": x}, lambda x: {"a": x, "b": x}),
        (lambda x: (x, "one"), lambda x: (x, "two")),
        (lambda x: (x, None), lambda x: (x, x)),
        (lambda x: (x,), lambda x: (x.float(),)),
    ],
)
def test_another_structure_of_what_stays_whole_is_an_error(first, other):
    def asks(self: Any, x: Tensor) -> Any:
        return first(x) if float(x.detach().sum()) < 0 else other(x)

    def around(self: Any, x: Tensor) -> Any:
        result = self.inner(self.before(x))
        items = result.values() if isinstance(result, dict) else result
        return [item for item in items if isinstance(item, Tensor)]

    before = nn.Linear(WIDTH, WIDTH, bias=False)
    network, x = written(around, before=before, inner=with_layer(asks)).double(), values(2, WIDTH)
    if float(network.before(x).detach().sum()) > 0:
        x = -x
    made = traced(network, x)
    assert len(run(made, x)) == len(network(x))
    with pytest.raises(StepError, match="The code around it was recorded with that"):
        run(made, -x)


def test_a_tensor_that_an_attribute_no_longer_is():
    def masks(self: Any, x: Tensor) -> Tensor:
        return x * self.mask * self.scale + self.shift

    for name in ("mask", "scale", "shift"):
        network = written(masks, mask=torch.ones(WIDTH), scale=nn.Parameter(torch.ones(WIDTH))).double()
        network.register_buffer("shift", torch.zeros(WIDTH))
        x = values(2, WIDTH)
        made = traced(network, x)
        assert made.fits([x])
        tensor = getattr(network, name)
        setattr(network, name, nn.Parameter(tensor.detach() * 2) if name == "scale" else tensor * 2)
        assert not made.fits([x])


def splits(self: Any, x: Tensor, places: Tensor) -> Tensor:
    parts = torch.tensor_split(self.layer(x), places)
    return sum(part.sum(0) * (index + 1) * len(part) for index, part in enumerate(parts))  # type: ignore[return-value]


def wraps(self: Any, x: Tensor) -> Tensor:
    return x * nn.Parameter(x, requires_grad=False)


class Anneals(L.LightningModule):
    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 if getattr(self, self.by) < 1 else 3)


@pytest.mark.parametrize(
    ("network", "others", "words"),
    [
        (with_layer(splits), (torch.tensor([2, 3]),), "a number of tensors which depends on values"),
        (written(wraps), (), "a tensor that was computed where it cannot be followed"),
        (Anneals("current_epoch"), (), "reads `current_epoch`, which changes in the run"),
        (Anneals("global_step"), (), "reads `global_step`, which changes in the run"),
    ],
    ids=["length of a tuple", "parameter of an argument", "epoch", "step"],
)
def test_forwards_that_depend_on_values_or_on_the_run_are_refused(network: nn.Module, others: Any, words: str):
    with pytest.raises(NotTraceable, match=words):
        traced(network, values(5, WIDTH), *others)


def test_a_tensor_that_is_passed_twice():
    def compares(self: Any, x: Tensor, y: Tensor) -> Tensor:
        x = x.add_(1)
        return x * (2 if x is y else 3) + y

    network, x = written(compares), values(2, WIDTH)
    made = traced(network, x, x)
    one, other = x.clone(), x.clone()
    assert torch.equal(run(made, one, one), network(other, other))


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of values that modules log."""
    names: list[str] = []
    monkeypatch.setattr(L.LightningModule, "log", lambda module, name, value: names.append(name))
    return names


def test_modules_of_other_threads_are_called_and_log_as_ever(logged):
    other, results = L.LightningModule(), []
    other.layer = nn.Linear(WIDTH, WIDTH)

    def works() -> None:
        results.append(other.layer(torch.ones(WIDTH)))
        other.log("elsewhere", 1.0)

    def starts(self: Any, x: Tensor) -> Tensor:
        thread = threading.Thread(target=works)
        thread.start()
        thread.join()
        return x * 2

    made = traced(written(starts), values(2, WIDTH))
    assert made.opaque == {}
    assert called(made) == []
    assert len(results) == 1
    assert logged == ["elsewhere"]


def test_a_first_call_that_sets_an_attribute_logs_nothing(logged):
    def prepares(self: Any, x: Tensor) -> Tensor:
        self.is_ready = True
        return x

    class Logs(L.LightningModule):
        def forward(self, x: Tensor) -> Tensor:
            self.log("mean", x.mean())
            return x

    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), written(prepares, is_ready=False), Logs()).double()
    traced(network, values(2, WIDTH))
    assert network[1].is_ready
    assert logged == []


def test_a_network_without_tensors_among_its_arguments():
    network = written(lambda self: self.tokens * 2, tokens=nn.Parameter(torch.ones(2, WIDTH)))
    assert torch.equal(run(traced(network)), network())
