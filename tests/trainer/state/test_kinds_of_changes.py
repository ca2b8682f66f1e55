"""Kinds of changes that hooks make: each comes back in a resumed run, or is named in a warning."""

import itertools
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.wrappers import Running

from tests.support.equality import assert_equal
from tests.support.resumption import SavesInHooks, assert_resumes
from tests.support.trainer_runs import Small, Validated, loader, trainer
from tests.trainer.state.resumed import fit, resumed

# The first step after which a change is made.
LATER = 1


class Meter:
    total = 0

    def __init__(self, total: int = 1) -> None:
        self.total = total

    def add(self) -> int:
        self.total += 1
        return self.total


def appended(values: list[int], last: int) -> int:
    values.append(last)
    return sum(values)


class Phase(Enum):
    FIRST, SECOND = 1, 2


class Point(NamedTuple):
    x: float
    y: float


@dataclass(slots=True)
class Slotted:
    level: float = 1.0


class Changing(Small):
    """Changes itself once, by `change`, before the second step of the run; its loss depends on `values`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.construct()

    def construct(self) -> None:
        pass

    def change(self) -> None:
        pass

    def values(self) -> list[float]:
        return [1.0]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == LATER:
            self.change()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * sum(self.values())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Removed(Changing):
    """An attribute, objects of a list and of a dictionary, a buffer that is not saved."""

    def construct(self) -> None:
        self.scale = 0.5
        self.listed = [Meter(total) for total in range(4)]
        self.named = {"a": Meter(), "b": Meter()}
        self.register_buffer("unsaved", torch.ones(()), persistent=False)

    def change(self) -> None:
        self.listed.pop(0)
        self.listed.pop()
        del self.scale, self.named["a"], self.unsaved

    def values(self) -> list[float]:
        present = [hasattr(self, "scale"), hasattr(self, "unsaved")]
        return [*present, *(meter.total for meter in self.listed), len(self.named)]


class Replaced(Changing):
    """Members of an enumeration, named tuples, tuples with objects, slots, attributes of an object."""

    def construct(self) -> None:
        self.phases = [Phase.FIRST, Phase.FIRST]
        self.point = Point(1, 2)
        self.pair = (Meter(), 1)
        self.slotted = Slotted()
        self.arguments = Namespace(scale=1.0, meter=Meter())

    def change(self) -> None:
        self.phases[0] = Phase.SECOND
        self.point = Point(1, 3)
        self.pair = (self.pair[0], 2)
        self.slotted.level = 0.25
        self.arguments.scale = 0.5

    def values(self) -> list[float]:
        # The members themselves stay as they are.
        phases = [phase.value for phase in (*self.phases, Phase.FIRST)]
        return [*phases, self.point.y, self.pair[1], self.slotted.level, self.arguments.scale]


class SeveralNames(Changing):
    """Names of one value that name another one later, together or one of them alone."""

    def construct(self) -> None:
        self.meters = [Meter(1), Meter(2)]
        self.meter = self.meters[0]
        self.anchor = self.mean = torch.zeros(2)
        self.alone: list[int] = []
        self.rows: list[int] = []
        self.by_name = {"alone": self.alone, "rows": self.rows}

    def change(self) -> None:
        self.meter = self.meters[1]
        self.mean = self.mean + 1
        self.alone = [1, 2]
        self.rows = []
        self.by_name["rows"] = self.rows

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.rows.append(batch_idx)

    def values(self) -> list[float]:
        means = [float(self.anchor.sum()), float(self.mean.sum())]
        lengths = [len(rows) for rows in (self.alone, *self.by_name.values())]
        return [self.meter.total, self.meters[0].total, *means, *lengths]


class MadeByTheEpoch(Changing):
    """A hook that is called again for its objects, but leaves weights, buffers and optimisers.

    Its objects are a value with a gradient, and layers, whose weights are saved.
    """

    def construct(self) -> None:
        self.activation: nn.Module = nn.ReLU()
        self.head = nn.Linear(1, 1)
        self.register_buffer("epochs", torch.zeros(()))

    def on_train_epoch_start(self) -> None:
        self.epochs += 1
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5
        self.meter = Meter()
        self.scale = torch.ones((), requires_grad=True)
        self.activation = nn.Tanh()
        self.head = nn.Linear(1, 1)
        nn.init.ones_(self.layer.weight)

    def loss(self, batch: Any) -> Any:
        return self.head(self.activation(self.layer(batch[0]))).square().mean()

    def values(self) -> list[float]:
        return [self.scale.requires_grad, self.meter.total, self.trainer.optimizers[0].param_groups[0]["lr"]]


class HeldByFunctions(Changing):
    """Values in closures, methods and partials, and a part of a metric that is no state of it."""

    def construct(self) -> None:
        counts = [1]
        total = 1.0

        def counted() -> float:
            nonlocal total
            counts.append(2)
            total *= 2
            return total + sum(counts)

        self.counted = counted
        self.method = Meter().add
        self.partial = partial(appended, [1], last=3)
        self.mean = Running(MeanMetric(), window=2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(self.global_step + 1)

    def values(self) -> list[float]:
        return [self.counted(), self.method(), self.partial(), float(self.mean.compute())]


@pytest.mark.parametrize("kind", [Removed, Replaced, SeveralNames, MadeByTheEpoch, HeldByFunctions])
def test_what_hooks_have_set_in_modules_comes_back_in_a_resumed_run(kind: type[Changing], tmp_path: Path) -> None:
    undisturbed, module = fit(kind()), resumed(kind, tmp_path)
    assert_equal((undisturbed.values(), undisturbed), (module.values(), module))


NAMED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "range": (lambda: range(3), lambda _: range(4), r"\(range range\(0, 4\)\)"),
    "iterator": (itertools.count, lambda value: itertools.count(next(value) + 5), r"\(count count\(5\)\)"),
    "set": (set, lambda _: {Phase.FIRST}, r"\(set \['<Phase.FIRST: 1>'\]\)"),
    "keys": (lambda: {Phase.FIRST: 1}, lambda _: {Phase.FIRST: 2}, r"\(dict "),
    "function": (lambda: torch.sin, lambda _: torch.cos, "cos"),
    "class": (Meter, lambda _: Slotted(), r"\(Slotted\)"),
    "layer": (nn.ReLU, lambda _: nn.Tanh(), r"\(Tanh\)"),
    "weights": (lambda: nn.Linear(1, 1), lambda _: nn.Linear(1, 1), r"\(Linear\)"),
    "no layer": (lambda: nn.Dropout(), lambda _: None, r"\(NoneType\)"),
}


@pytest.mark.parametrize("kind", NAMED)
def test_what_cannot_come_back_is_named(kind: str, tmp_path: Path) -> None:
    first, later, named = NAMED[kind]

    class Module(Changing):
        def construct(self) -> None:
            self.value = first()

        def change(self) -> None:
            self.value = later(self.value)

    with pytest.warns(UserWarning, match=rf"lacks what the checkpoint cannot hold: Module\.value .*{named}"):
        resumed(Module, tmp_path)


HIDDEN: dict[str, Callable[[Any], Any]] = {
    "tuple_iterator": lambda _: iter((1, 2, 3, 4)),
    "generator": lambda _: (number for number in range(9)),
    "Adam": lambda module: torch.optim.Adam(module.layer.parameters()),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_iterators_and_further_optimisers_are_named_unless_the_epoch_makes_them(kind: str, tmp_path: Path) -> None:
    class Module(Changing):
        def construct(self) -> None:
            self.value = HIDDEN[kind](self)

    class OfTheEpoch(Small):
        def on_train_epoch_start(self) -> None:
            self.value = HIDDEN[kind](self)

    with pytest.warns(UserWarning, match=rf"has Module\.value \({kind}\) as made anew: .* no position of an iterator"):
        resumed(Module, tmp_path)
    with pytest.warns(UserWarning, match=rf"has OfTheEpoch\.value \({kind}\) as made anew"):
        resumed(OfTheEpoch, tmp_path)
    # An epoch's end, after which the value is that of the next epoch.
    fit(OfTheEpoch(), saves := SavesInHooks(tmp_path, ["on_train_epoch_end"], [1]))
    fit(OfTheEpoch(), path=saves.saved[0].path)


def test_other_arguments_of_the_constructor_stay(tmp_path: Path) -> None:
    class Module(Small):
        def __init__(self, alpha: float, options: dict[str, Any], names: str) -> None:
            super().__init__()
            self.alpha, self.options, self.best, self.names = alpha, options, float("nan"), set(names)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.alpha *= 0.5
            self.options["count"] += 1
            self.best = 1.0
            self.names.add("c")

    fit(Module(1.0, {"rate": 1, "count": 0}, "ab"), saves := SavesInHooks(tmp_path, ["on_train_batch_end"], [3]))

    def again(alpha: float, names: str, **options: Any) -> Any:
        return fit(Module(alpha, options, names), path=saves.saved[0].path)

    # 1. What no hook had changed is the new one, without a warning.
    module = again(1.0, "ba", rate=2, count=0, more=3)
    assert (module.alpha, module.best, module.names) == (2**-4, 1.0, {"a", "b", "c"})
    assert module.options == {"rate": 2, "count": 4, "more": 3}
    # 2. What hooks had changed is the new one, too, and a warning names it.
    with pytest.warns(
        UserWarning, match=r"had changed these since: Module\.alpha, Module\.options\['count'\], Module\.names\."
    ) as warned:
        module = again(3.0, "z", rate=2, count=7)
    assert len([each for each in warned if "constructed with" in str(each.message)]) == 1
    assert (module.alpha, module.options, module.names) == (1.5, {"rate": 2, "count": 8}, {"z", "c"})


def test_counters_of_a_module_that_has_trained_before_come_back(tmp_path: Path) -> None:
    class Counts(Small):
        begun = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.begun += 1

    module = fit(Counts(), saves := SavesInHooks(tmp_path, ["on_train_batch_end"], [3]))
    total = module.begun
    assert fit(module, path=saves.saved[0].path).begun == total


def test_what_the_sanity_check_changes_comes_back(tmp_path: Path) -> None:
    class Validations(Callback):
        ended = 0

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            self.ended += 1

    def run(callbacks: list[Any], path: Path | None) -> int:
        validations = Validations()
        run = trainer(num_sanity_val_steps=1, callbacks=[validations, *callbacks])
        run.fit(Validated(), loader(2), loader(2), ckpt_path=path)
        return validations.ended

    assert_resumes(run, tmp_path, ["on_train_batch_end"], calls=[1])


@pytest.mark.thorough
@pytest.mark.parametrize(("every", "estimates"), [(0, False), (2, True)])
def test_training_loaders_are_requested_from_the_state_in_which_they_were(
    every: int, estimates: bool, tmp_path: Path
) -> None:
    class Module(Small):
        def configure_optimizers(self) -> Any:
            self.steps = self.trainer.estimated_stepping_batches if estimates else 0
            return super().configure_optimizers()

    class Requests(LightningDataModule):
        requests = 0

        def train_dataloader(self) -> Any:
            self.requests += 1
            # Too large to be state themselves.
            factors = (1 << 17) * [self.requests + self.trainer.current_epoch + float(torch.rand(()))]
            rows = torch.tensor(factors)[:, None].expand(-1, 2).clone()
            return DataLoader(rows, batch_size=1 << 16)

    def run(callbacks: list[Any], path: Path | None) -> tuple[int, Module]:
        # Another process has drawn other numbers by now, which only requests that are repeated make good.
        if not every or estimates:
            torch.manual_seed(0)
        module, data = Module(), Requests()
        run = trainer(max_epochs=3, reload_dataloaders_every_n_epochs=every, callbacks=callbacks)
        run.fit(module, datamodule=data, ckpt_path=path)
        return data.requests, module

    assert_resumes(run, tmp_path, ["on_train_batch_end"], calls=[1, 3, 5])
