"""Differences of other calls are noticed: a recorded forward that no longer fits is recorded anew, or refused."""

import threading
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from equipoise import StepError
from equipoise.extensions.pipeline.recording.tracing import NotTraceable
from tests.support.traces import run, traced

WIDTH = 6


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Steps(nn.Module):
    """Goes through the second dimension by a function that returns a tuple."""

    def __init__(self, divide: Any) -> None:
        super().__init__()
        self.cell, self.divide = nn.Linear(WIDTH, WIDTH), divide

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for part in self.divide(x):
            state = torch.tanh(self.cell(part.reshape(len(x), -1)) + state)
        return state


@pytest.mark.parametrize("divide", [lambda x: x.unbind(1), lambda x: x.split(1, 1), lambda x: list(x.unbind(dim=1))])
def test_the_length_of_a_tuple_is_a_size(divide):
    network = Steps(divide).double()
    made = traced(network, values(2, 3, WIDTH))
    x = values(2, 3, WIDTH)
    assert made.fits([x])
    assert torch.equal(run(made, x), network(x))
    assert not made.fits([values(2, 5, WIDTH)])


@pytest.mark.parametrize("change", [lambda x: x.unsqueeze_(1), lambda x: x.t_()])
def test_a_size_of_an_argument_is_compared_before_the_forward_changes_it(change):
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            count = x.size(0)
            change(x)
            return self.layer(x.reshape(count, WIDTH))

    network, x = Changes().double(), values(2, WIDTH)
    made = traced(network, x)
    assert made.fits([x])
    assert torch.equal(run(made, x.clone()), network(x.clone()))
    assert not made.fits([values(3, WIDTH)])


def assign(y: Tensor, places: Tensor) -> None:
    y[places[:, 0], places[:, 1]] = 1.0


def add(y: Tensor, places: Tensor) -> None:
    y.index_add_(0, places[:, 0], torch.ones_like(y)[places[:, 0]])


def resize(y: Tensor, places: Tensor) -> None:
    y.resize_as_(places.double())


class ChangedAtPlaces(nn.Module):
    """Asks for the size of a tensor that was changed in place, at places that depend on values."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(WIDTH, WIDTH), change

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        y = torch.zeros_like(x)
        self.change(y, (x > 0).nonzero())
        return x * y.shape[1] + y.sum()


@pytest.mark.parametrize("change", [assign, add])
def test_a_change_in_place_keeps_sizes(change):
    network = ChangedAtPlaces(change).double()
    made = traced(network, values(5, WIDTH))
    x = values(5, WIDTH)
    assert made.fits([x])
    assert torch.equal(run(made, x), network(x))
    assert not made.fits([values(4, WIDTH)])


def test_a_change_in_place_to_the_size_of_another_tensor():
    with pytest.raises(NotTraceable, match="asks for values of tensors, by `shape`"):
        traced(ChangedAtPlaces(resize).double(), values(5, WIDTH))


def test_a_tuple_whose_length_depends_on_values_stays_whole():
    class Splits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            parts = torch.tensor_split(self.layer(x), places)
            return sum(part.sum(0) * (index + 1) * len(part) for index, part in enumerate(parts))  # type: ignore[return-value]

    with pytest.raises(NotTraceable):
        traced(Splits().double(), values(5, WIDTH), torch.tensor([2, 3]))


def test_changes_in_place_under_inference_mode():
    class Zeroes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = x * 1
            x[mask] = 0
            return self.layer(torch.add(x, 1, out=torch.empty_like(x)))

    network = Zeroes().double()
    with torch.inference_mode():
        made = traced(network, values(3, WIDTH), torch.zeros(3, dtype=torch.bool))
        x, mask = values(3, WIDTH), torch.tensor([True, False, True])
        assert torch.equal(run(made, x, mask), network(x, mask))
        assert torch.is_inference_mode_enabled()


class Whole(nn.Module):
    """Asks for a value, and returns one of two structures."""

    def __init__(self, first: Any, other: Any) -> None:
        super().__init__()
        self.layer, self.first, self.other = nn.Linear(WIDTH, WIDTH), first, other

    def forward(self, x: Tensor) -> Any:
        return self.first(x) if float(x.detach().sum()) < 0 else self.other(x)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH, bias=False), inner

    def forward(self, x: Tensor) -> Any:
        result = self.inner(self.before(x))
        items = result.values() if isinstance(result, dict) else result
        return [item for item in items if isinstance(item, Tensor)]


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
    network, x = Around(Whole(first, other)).double(), values(2, WIDTH)
    if float(network.before(x).detach().sum()) > 0:
        x = -x
    made = traced(network, x)
    assert len(run(made, x)) == len(network(x))
    with pytest.raises(StepError, match="The code around it was recorded with that"):
        run(made, -x)


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.clone(), bool(x.sum() > 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def test_a_number_that_an_autograd_function_returns_is_no_constant():
    class Applies(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x, is_positive = Counts.apply(x)
            return x * (2 if is_positive else 3)

    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), Applies()).double()
    made = traced(network, values(2, WIDTH))
    assert "Counts returns a bool, which may change" in made.opaque["1"]


def test_a_tensor_that_an_attribute_no_longer_is():
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask, self.scale = torch.ones(WIDTH), nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("shift", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask * self.scale + self.shift

    for name in ("mask", "scale", "shift"):
        network, x = Masks().double(), values(2, WIDTH)
        made = traced(network, x)
        assert made.fits([x])
        tensor = getattr(network, name)
        setattr(network, name, nn.Parameter(tensor.detach() * 2) if name == "scale" else tensor * 2)
        assert not made.fits([x])


@pytest.mark.parametrize("name", ["current_epoch", "global_step"])
def test_a_forward_that_asks_how_far_the_run_is(name):
    class Anneals(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (1 if getattr(self, name) < 1 else 3)

    with pytest.raises(NotTraceable, match=f"reads `{name}`, which changes in the run"):
        traced(Anneals().double(), values(2, WIDTH))


def test_a_parameter_of_an_argument_is_no_constant():
    class Wraps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * nn.Parameter(x, requires_grad=False)

    with pytest.raises(NotTraceable):
        traced(Wraps(), values(2, WIDTH))


def test_a_tensor_that_is_passed_twice():
    class Changes(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x.add_(1)
            return x * (2 if x is y else 3) + y

    network, x = Changes(), values(2, WIDTH)
    made = traced(network, x, x)
    one, other = x.clone(), x.clone()
    assert torch.equal(run(made, one, one), network(other, other))


def test_a_part_of_a_tensor_of_any_size_is_no_constant_number_of_parts():
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            chosen = x[x[:, 0] > 0]
            return self.layer(torch.stack([part.sum(0) for part in chosen.split(2)]).sum(0))

    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), Halves()).double()
    made = traced(network, values(3, WIDTH))
    assert "a number of tensors which depends on values" in made.opaque["1"]


def test_values_of_other_threads_are_logged_during_a_recording(monkeypatch):
    logged: list[str] = []
    monkeypatch.setattr(L.LightningModule, "log", lambda module, name, value: logged.append(name))
    other = L.LightningModule()

    class Starts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: other.log("elsewhere", 1.0))
            thread.start()
            thread.join()
            return x * 2

    traced(Starts(), values(2, WIDTH))
    assert logged == ["elsewhere"]


def test_a_first_call_that_sets_an_attribute_logs_nothing(monkeypatch):
    logged: list[str] = []
    monkeypatch.setattr(L.LightningModule, "log", lambda module, name, value: logged.append(name))

    class Prepares(nn.Module):
        is_ready = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_ready:
                self.is_ready = True
            return x

    class Logs(L.LightningModule):
        def forward(self, x: Tensor) -> Tensor:
            self.log("mean", x.mean())
            return x

    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), Prepares(), Logs()).double()
    traced(network, values(2, WIDTH))
    assert network[1].is_ready
    assert logged == []


def test_a_network_without_tensors_among_its_arguments():
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Parameter(torch.ones(2, WIDTH))

        def forward(self) -> Tensor:
            return self.tokens * 2

    network = Learned()
    assert torch.equal(run(traced(network)), network())
