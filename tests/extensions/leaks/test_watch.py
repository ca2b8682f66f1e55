"""Planted leaks are found and named; healthy runs are left in peace."""

import functools
import gc
import random
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.extensions.leaks import watch as watch_module
from equipoise.extensions.leaks.references import find_holders, find_tensors, globals_of_user, is_of_user
from equipoise.extensions.leaks.watch import FROZEN_BY_PYTHON, Leak, LeakWatch

pytestmark = pytest.mark.usefixtures("full_collections")

HISTORY: list[Tensor] = []  # a global of a user's module, as far as the watch can tell
STEPS = 30


class Model(nn.Module):
    seen: dict[int, Tensor] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        self.total: Any = 0
        self.losses: list[Tensor] = []
        self.by_name: dict[str, list[Tensor]] = {"train": []}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    HISTORY.clear()
    Model.seen.clear()
    assert gc.get_freeze_count() <= FROZEN_BY_PYTHON


@pytest.fixture
def set_aside() -> Iterator[None]:
    """Pass over all earlier objects, whose examination would take most of the time."""
    gc.freeze()
    yield
    gc.unfreeze()


Keep = Callable[[Model, Tensor, int], None]


def run(
    keep: Keep,
    *,
    model: Model | None = None,
    steps: int = STEPS,
    roots: dict[str, object] | None = None,
    passes_over: Callable[[Any], bool] = lambda _: False,
) -> list[Leak]:
    """Trains, keeps something after every step, and returns what was found."""
    model = model or Model()
    optimizer = torch.optim.Adam(model.parameters())
    watch = LeakWatch(lambda: {"model": model, **(roots or {})}, passes_over)
    watch.start()
    found: list[Leak] = []
    try:
        for step in range(steps):
            loss = model(torch.randn(4, 6)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            keep(model, loss, step)
            del loss
            if watch.watches_steps:
                found += watch.after_step(step + 1)
    finally:
        watch.stop()
    return found


def add(model: Model, loss: Tensor, step: int) -> None:
    model.total = model.total + loss


def append_to_dictionary(model: Model, loss: Tensor, step: int) -> None:
    model.by_name["train"].append(loss * 2)


def append_to_global(model: Model, loss: Tensor, step: int) -> None:
    HISTORY.append(loss)


def keep_in_class(model: Model, loss: Tensor, step: int) -> None:
    Model.seen[step] = loss


@pytest.mark.quick_cases(3)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("keep", "holder"),
    [
        (add, "model.total"),
        (append_to_dictionary, "model.by_name['train']"),
        (append_to_global, f"{__name__}.HISTORY"),
        (keep_in_class, "Model.seen"),
    ],
)
def test_planted_leaks_are_named_with_their_line(keep: Keep, holder: str) -> None:
    (leak,) = run(keep)
    assert leak.holder == holder
    assert leak.with_graph
    assert leak.step <= 14
    assert leak.line.startswith("test_watch.py:")
    assert holder in str(leak)
    assert leak.line in str(leak)


@pytest.mark.thorough
@pytest.mark.usefixtures("set_aside")
def test_leaks_into_tensors_that_were_there_before_training() -> None:
    """In place, so that a tensor that is older than the watch gets a graph: an attribute, a buffer, a global."""

    def of_attribute(model: Model, loss: Tensor, step: int) -> None:
        model.total += loss

    def of_buffer(model: Model, loss: Tensor, step: int) -> None:
        model.sum += loss

    def of_global(model: Model, loss: Tensor, step: int) -> None:
        HISTORY[0] += loss

    HISTORY.append(torch.zeros(()))
    for keep, holder in ((of_attribute, "model.total"), (of_buffer, "model.sum"), (of_global, f"{__name__}.HISTORY")):
        model = Model()
        model.total = torch.zeros(())
        model.register_buffer("sum", torch.zeros(()))
        assert [leak.holder for leak in run(keep, model=model)] == [holder]


@pytest.mark.thorough
def test_a_leak_into_a_container_is_told_once() -> None:
    def pairs(model: Model, loss: Tensor, step: int) -> None:
        model.losses.append({"step": step, "loss": loss})  # type: ignore[arg-type]

    def by_step(model: Model, loss: Tensor, step: int) -> None:
        model.by_name[f"step{step}"] = [loss]

    assert [leak.holder for leak in run(pairs)] == ["model.losses[…]['loss']"]
    assert [leak.holder for leak in run(by_step)] == ["model.by_name['step…']"]


@pytest.mark.slow
@pytest.mark.usefixtures("set_aside")
def test_growing_graphs_of_which_nothing_stays_are_no_leak() -> None:
    """A recurrent network on ever longer sequences whose last output is kept."""
    cell, kept = nn.GRUCell(3, 3), types.SimpleNamespace(last=None)

    def keep(model: Model, loss: Tensor, step: int) -> None:
        hidden = torch.zeros(2, 3)
        for _ in range(4 + step):
            hidden = cell(torch.randn(2, 3), hidden)
        kept.last = hidden.mean()

    assert not run(keep, roots={"kept": kept})


def test_objects_that_fail_when_they_are_read_are_passed_over() -> None:
    class Closed(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise OSError("the file is closed")

    class Lazy:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("not loaded")

    gone = weakref.proxy(Model())
    loss = torch.ones(())
    root = types.SimpleNamespace(gone=gone, closed=Closed(a=1), lazy=Lazy(), deep=[loss])
    assert find_holders({id(loss): loss}, {"root": root}) == {id(loss): "root.deep[0]"}


class Deprecated:
    """Warns of each reading, as `torch.distributed.reduce_op` does."""

    __slots__ = ("__dict__", "last")

    def __getattribute__(self, name: str) -> Any:
        warnings.warn("deprecated", FutureWarning, stacklevel=2)
        return super().__getattribute__(name)


def test_objects_that_warn_when_they_are_read() -> None:
    """Warnings are errors here."""
    root = Deprecated()
    losses = [torch.ones(1), torch.ones(1)]
    object.__setattr__(root, "first", losses[0])
    object.__setattr__(root, "last", losses[1])
    paths = find_holders({id(loss): loss for loss in losses}, {"root": root})
    assert [paths[id(loss)] for loss in losses] == ["root.first", "root.last"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        find_holders({}, {"distributed": torch.distributed.reduce_op})
    assert not caught


def test_of_a_large_container_the_end_is_searched() -> None:
    """A data set of millions of entries in a list would take the time of many steps."""
    loss = torch.ones(())
    many: list[Any] = [0] * 5000
    assert find_holders({id(loss): loss}, {"root": {"many": [loss, *many]}}) == {}
    assert find_holders({id(loss): loss}, {"root": {"many": [*many, loss]}}) == {id(loss): "root['many'][5000]"}
    assert find_holders({id(loss): loss}, {"root": dict(enumerate([*many, loss]))}) == {id(loss): "root[5000]"}
    found = find_tensors({"root": [loss, [*many, loss], [loss]]}, lambda thing: thing == [loss], most=10_000)
    assert [tensor is loss for tensor in found] == [True, True]  # and nothing of what is passed over


@pytest.mark.thorough
def test_a_forward_hook_that_keeps_activations_is_named() -> None:
    model = Model()
    activations: list[Tensor] = []
    model.layer[0].register_forward_hook(lambda module, args, output: activations.append(output))
    (leak,) = run(lambda model, loss, step: None, model=model)
    assert "'activations' in" in leak.holder
    assert "a forward hook of model.layer.0" in leak.holder


@pytest.mark.slow
def test_many_bytes_without_a_graph_are_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_MANY_BYTES", 2**21)
    kept: list[Tensor] = []
    found = run(
        lambda model, loss, step: kept.append(torch.ones(100_000)),
        roots={"callback": types.SimpleNamespace(kept=kept)},
    )
    assert [(leak.holder, leak.with_graph) for leak in found] == [("callback.kept", False)]
    assert "MiB" in str(found[0])


@pytest.mark.slow
def test_what_keeps_on_purpose_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_MANY_BYTES", 2**18)

    class Metric:
        def __init__(self) -> None:
            self.preds: list[Tensor] = []

    metric = Metric()
    # Some more steps than the growths that would be told; each of those looks at all there is.
    found = run(
        lambda model, loss, step: metric.preds.append(torch.ones(12_000)),
        steps=13,
        roots={"metric": types.SimpleNamespace(own=metric)},
        passes_over=lambda thing: thing is metric,
    )
    assert not found


@pytest.mark.slow
def test_a_constant_holder_beside_a_leak_is_not_blamed() -> None:
    model = Model()
    model.register_module("extra", nn.Linear(1, 1))

    def keep(model: Model, loss: Tensor, step: int) -> None:
        model.last = loss  # as large as the graph of a step, but it does not grow
        model.total = model.total + loss.detach().requires_grad_()

    (leak,) = run(keep, model=model)
    assert leak.holder == "model.total"


def last(model: Model, loss: Tensor, step: int) -> None:
    model.last = loss


def ring(model: Model, loss: Tensor, step: int) -> None:
    model.__dict__.setdefault("ring", deque(maxlen=5)).append(loss)


def detached(model: Model, loss: Tensor, step: int) -> None:
    model.losses.append(loss.detach())


def numbers(model: Model, loss: Tensor, step: int) -> None:
    model.total += loss.item()


def average(model: Model, loss: Tensor, step: int) -> None:
    model.average = 0.9 * getattr(model, "average", 0.0) + 0.1 * loss.detach()


def rare(model: Model, loss: Tensor, step: int) -> None:
    if step in (1, 13):
        model.by_name["train"].append(loss)


def sawtooth(model: Model, loss: Tensor, step: int) -> None:
    model.seldom_emptied = loss if step % 4 == 0 else model.seldom_emptied + loss


HABITS = [last, ring, detached, numbers, average, rare, sawtooth]


@pytest.mark.thorough
@pytest.mark.usefixtures("set_aside")
def test_healthy_habits_are_left_in_peace() -> None:
    """Each habit keeps tensors, but no growing graph."""

    def keep(model: Model, loss: Tensor, step: int) -> None:
        for habit in HABITS:
            habit(model, loss, step)

    assert not run(keep)


def leaks_of_epochs(seconds: float) -> list[str]:
    """Return what holds a leak of a loss in each of six epochs, of so many seconds."""
    model = Model()
    watch = LeakWatch(lambda: {"model": model}, lambda _: False)
    found: list[Leak] = []
    for epoch in range(6):
        model.losses.append(model(torch.randn(2, 6)).mean())
        model.best = getattr(model, "best", model.losses[0].exp())  # keeps a graph, too, but it does not grow
        found += watch.after_epoch(epoch, seconds=seconds)
    return [leak.holder for leak in found]


# Graphs of other tests may be collected between two epochs, and would make up for the growth.
@pytest.mark.usefixtures("set_aside")
@pytest.mark.slow
def test_growth_from_epoch_to_epoch_is_noticed_when_epochs_end() -> None:
    """It is too rare for the first steps."""
    assert leaks_of_epochs(seconds=1e9) == ["model.losses"]


def test_epochs_are_passed_over_where_looking_takes_too_long() -> None:
    assert leaks_of_epochs(seconds=0.0) == []


@pytest.mark.thorough
def test_objects_that_somebody_set_aside_stay_there() -> None:
    gc.freeze()
    try:
        watch = LeakWatch(dict, lambda _: False)
        watch.start()
        watch.stop()
        assert gc.get_freeze_count() > FROZEN_BY_PYTHON
    finally:
        gc.unfreeze()


@pytest.mark.thorough
def test_files_and_modules_of_the_user_are_told_from_those_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_of_user(__file__)
    assert not is_of_user(torch.__file__)
    assert not is_of_user(random.__file__)
    assert not is_of_user(find_holders.__code__.co_filename)
    assert not is_of_user("<string>")
    assert not is_of_user(None)
    # Some libraries put other objects there.
    monkeypatch.setitem(sys.modules, "proxy", types.SimpleNamespace(__file__=__file__, __name__="proxy"))  # type: ignore[arg-type]
    found = globals_of_user()
    assert __name__ in found
    assert not found.keys() & {"torch", "random", "proxy"}


@pytest.mark.thorough
@pytest.mark.usefixtures("set_aside")
def test_paths_through_slots_partials_methods_arrays_and_generators() -> None:

    class Slotted:
        __slots__ = ("inside",)

        def __init__(self, inside: object) -> None:
            self.inside = inside

        def method(self) -> None: ...

    target = torch.ones(1)
    targets = {id(target): target}

    def default(x: Any = target) -> None: ...

    array = np.empty(2, dtype=object)
    array[1] = target

    def generate(mine: list[Tensor]) -> Iterator[int]:
        yield len(mine)

    running = generate([target])
    next(running)

    for root, path in [
        (Slotted(target), "root.inside"),
        (Slotted(target).method, "root.inside"),
        (functools.partial(print, target), "root.args[0]"),
        (functools.partial(print, end=target), "root.keywords['end']"),
        ({"a": (1, [target])}, "root['a'][1][0]"),
        ({1: {target}}, "an element of root[1]"),
        ({"k" * 50: target}, f"root['{'k' * 36}...]"),
        (default, f"a default argument of {default.__qualname__}"),
        (array, "root[1]"),
        (running, "'mine' in root[0]"),
    ]:
        assert find_holders(targets, {"root": root})[id(target)] == path
