"""Kinds of changes that hooks make: each comes back in a resumed run, or is named in a warning."""

import itertools
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.wrappers import Running

from tests.support.trainer_runs import trainer
from tests.trainer.loops.test_resumption import SaveEverywhere
from tests.trainer.state.test_hook_state import ROWS, Recording, Saves, resumed

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


class Changing(Recording):
    """Changes itself once, by `change`, before the second step of the run; its loss depends on `factor`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.construct()

    def construct(self) -> None:
        pass

    def change(self) -> None:
        pass

    def factor(self) -> float:
        return 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == LATER:
            self.change()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.factor()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Attribute(Changing):
    def construct(self) -> None:
        self.scale = 0.5

    def change(self) -> None:
        del self.scale

    def factor(self) -> float:
        return getattr(self, "scale", 1.0)


class ListOfObjects(Changing):
    def construct(self) -> None:
        self.meters = [Meter(total) for total in range(4)]

    def change(self) -> None:
        self.meters.pop(0)
        self.meters.pop()

    def factor(self) -> float:
        return len(self.meters) + self.meters[0].total


class DictionaryOfObjects(Changing):
    def construct(self) -> None:
        self.meters = {"a": Meter(), "b": Meter()}

    def change(self) -> None:
        del self.meters["a"]

    def factor(self) -> float:
        return len(self.meters)


class UnsavedBuffer(Changing):
    def construct(self) -> None:
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def change(self) -> None:
        del self.scale

    def factor(self) -> float:
        return 1 + hasattr(self, "scale")


class Member(Changing):
    def construct(self) -> None:
        self.phases = [Phase.FIRST, Phase.FIRST]

    def change(self) -> None:
        self.phases[0] = Phase.SECOND

    def factor(self) -> float:
        # The members themselves stay as they are.
        return sum(phase.value for phase in self.phases) + 10 * Phase.FIRST.value


class Tuples(Changing):
    def construct(self) -> None:
        self.point = Point(1, 2)
        self.pair = (Meter(), 1)

    def change(self) -> None:
        self.point = Point(1, 3)
        self.pair = (self.pair[0], 2)

    def factor(self) -> float:
        assert isinstance(self.point, Point)
        return self.point.y + self.pair[1]


class Slots(Changing):
    def construct(self) -> None:
        self.slotted = Slotted()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.slotted.level *= 0.5

    def factor(self) -> float:
        return self.slotted.level


class Arguments(Changing):
    def construct(self) -> None:
        self.arguments = Namespace(scale=1.0, meter=Meter())

    def change(self) -> None:
        self.arguments.scale = 0.5

    def factor(self) -> float:
        return self.arguments.scale


class OneOfSeveral(Changing):
    def construct(self) -> None:
        self.meters = [Meter(1), Meter(2)]
        self.meter = self.meters[0]

    def change(self) -> None:
        self.meter = self.meters[1]

    def factor(self) -> float:
        return self.meter.total + 10 * self.meters[0].total


class InADictionaryToo(Changing):
    def construct(self) -> None:
        self.rows: list[int] = []
        self.by_name = {"rows": self.rows}

    def change(self) -> None:
        self.rows = []
        self.by_name = {"rows": self.rows}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.rows.append(batch_idx)

    def factor(self) -> float:
        return 1 + len(self.by_name["rows"])


class NoLongerOne(Changing):
    """Names of one value in the constructor, of which one is another value later."""

    def construct(self) -> None:
        self.anchor = self.mean = torch.zeros(2)
        self.rows: list[int] = []
        self.by_name = {"rows": self.rows}

    def change(self) -> None:
        self.mean = self.mean + 1
        self.rows = [1, 2]

    def factor(self) -> float:
        return 1 + float(self.anchor.sum()) + float(self.mean.sum()) + len(self.by_name["rows"])


class WithGradient(Changing):
    def on_train_epoch_start(self) -> None:
        self.scale = torch.ones((), requires_grad=True)

    def factor(self) -> float:
        return 1.0 + self.scale.requires_grad


class Layer(Changing):
    """A layer of another class, and one of the same with other weights, which come with the checkpoint."""

    def construct(self) -> None:
        self.activation: nn.Module = nn.ReLU()
        self.head = nn.Linear(1, 1)

    def on_train_epoch_start(self) -> None:
        self.activation = nn.Tanh()
        self.head = nn.Linear(1, 1)

    def loss(self, batch: Any) -> Any:
        return self.head(self.activation(self.layer(batch))).square().mean()


class WeightsOfTheEpoch(Changing):
    """A hook that is called again for its object, and changes weights as well."""

    def on_train_epoch_start(self) -> None:
        self.meter = Meter()
        nn.init.ones_(self.layer.weight)


class Parts(Changing):
    """Values that functions, methods and partials hold."""

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

    def factor(self) -> float:
        return self.counted() + self.method() + self.partial()


class PlainPartOfAMetric(Changing):
    def construct(self) -> None:
        self.mean = Running(MeanMetric(), window=2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(self.global_step + 1)

    def factor(self) -> float:
        return float(self.mean.compute())


KINDS: list[type[Changing]] = [
    *(Attribute, ListOfObjects, DictionaryOfObjects, UnsavedBuffer, Member, Tuples, Slots, Arguments, OneOfSeveral),
    *(InADictionaryToo, NoLongerOne, WithGradient, Layer, WeightsOfTheEpoch, Parts, PlainPartOfAMetric),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_as_the_undisturbed_one(kind: type[Changing], tmp_path: Path) -> None:
    torch.manual_seed(1)
    undisturbed = kind()
    trainer(max_epochs=2).fit(undisturbed, DataLoader(ROWS, batch_size=2))
    torch.manual_seed(1)
    module = resumed(kind, tmp_path)
    assert module.factor() == undisturbed.factor()
    for actual, expected in zip(module.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(actual, expected)


NAMED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "datetime": (lambda: datetime(2020, 1, 1), lambda _: datetime(2021, 1, 1), r"\(datetime datetime.datetime\(2021, "),
    "fraction": (lambda: Fraction(1, 2), lambda _: Fraction(1, 3), r"\(Fraction Fraction\(1, 3\)\)"),
    "decimal": (lambda: Decimal("1.5"), lambda _: Decimal("2.5"), r"\(Decimal Decimal\('2.5'\)\)"),
    "range": (lambda: range(3), lambda _: range(4), r"\(range range\(0, 4\)\)"),
    "slice": (lambda: slice(3), lambda _: slice(4), r"\(slice slice\(None, 4, None\)\)"),
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
    "cycle": lambda _: itertools.cycle([1, 2]),
    "generator": lambda _: (number for number in range(9)),
    "Adam": lambda module: torch.optim.Adam(module.layer.parameters()),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_iterators_and_further_optimisers_are_named_unless_the_epoch_makes_them(kind: str, tmp_path: Path) -> None:
    class Module(Changing):
        def construct(self) -> None:
            self.value = HIDDEN[kind](self)

    class OfTheEpoch(Recording):
        def on_train_epoch_start(self) -> None:
            self.value = HIDDEN[kind](self)

    with pytest.warns(UserWarning, match=rf"has Module\.value \({kind}\) as made anew: .* no position of an iterator"):
        resumed(Module, tmp_path)
    with pytest.warns(UserWarning, match=rf"has OfTheEpoch\.value \({kind}\) as made anew"):
        resumed(OfTheEpoch, tmp_path)
    # An epoch's end, after which the value is that of the next epoch.
    saves = SaveEverywhere(tmp_path, ("on_train_epoch_end",))
    trainer(max_epochs=2, callbacks=[saves]).fit(OfTheEpoch(), DataLoader(ROWS, batch_size=2))
    path = next(tmp_path.glob("on_train_epoch_end*"))
    trainer(max_epochs=2).fit(OfTheEpoch(), DataLoader(ROWS, batch_size=2), ckpt_path=path)


def test_other_arguments_of_the_constructor_stay(tmp_path: Path) -> None:
    class Module(Recording):
        def __init__(self, alpha: float, options: dict[str, Any]) -> None:
            super().__init__()
            self.alpha, self.options, self.best, self.names = alpha, options, float("nan"), {"a", "b"}

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.alpha *= 0.5
            self.options["count"] += 1
            self.best = 1.0
            self.names.add("c")

    trainer(max_epochs=2, callbacks=[Saves(tmp_path)]).fit(
        Module(1.0, {"rate": 1, "count": 0}), DataLoader(ROWS, batch_size=2)
    )

    def again(alpha: float, **options: Any) -> Any:
        module = Module(alpha, options)
        path = tmp_path / "on_train_batch_end-03.ckpt"
        trainer(max_epochs=2).fit(module, DataLoader(ROWS, batch_size=2), ckpt_path=path)
        return module

    # 1. What no hook had changed is the new one, without a warning.
    module = again(1.0, rate=2, count=0, more=3)
    assert (module.alpha, module.best, module.names) == (2**-4, 1.0, {"a", "b", "c"})
    assert module.options == {"rate": 2, "count": 4, "more": 3}
    # 2. What hooks had changed is the new one, too, and a warning names it.
    with pytest.warns(
        UserWarning, match=r"had changed these since: Module\.alpha, Module\.options\['count'\]\."
    ) as warned:
        module = again(3.0, rate=2, count=7)
    assert len([each for each in warned if "constructed with" in str(each.message)]) == 1
    assert (module.alpha, module.options) == (1.5, {"rate": 2, "count": 8})


def test_a_value_as_constructed_comes_back_over_that_of_the_start(tmp_path: Path) -> None:
    class Module(Changing):
        def construct(self) -> None:
            self.level = 1

        def on_train_start(self) -> None:
            self.level = 5

        def change(self) -> None:
            self.level = 1

    assert resumed(Module, tmp_path).level == 1


def test_counters_of_objects_that_have_trained_before_come_back(tmp_path: Path) -> None:
    class Counts(Recording):
        begun = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.begun += 1

    module = Counts()
    data = DataLoader(ROWS, batch_size=2)
    trainer(max_epochs=2, callbacks=[Saves(tmp_path)]).fit(module, data)
    total = module.begun
    trainer(max_epochs=2).fit(module, data, ckpt_path=tmp_path / "on_train_batch_end-03.ckpt")
    assert module.begun == total


def test_what_the_sanity_check_changes_comes_back(tmp_path: Path) -> None:
    class Validations(Saves):
        ended = 0

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            self.ended += 1

    class Validated(Recording):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    data = DataLoader(ROWS, batch_size=2)
    undisturbed, again = Validations(tmp_path), Validations(tmp_path)
    options = {"max_epochs": 1, "num_sanity_val_steps": 1}
    trainer(**options, callbacks=[undisturbed]).fit(Validated(), data, data)
    trainer(**options, callbacks=[again]).fit(
        Validated(), data, data, ckpt_path=tmp_path / "on_train_batch_end-01.ckpt"
    )
    assert again.ended == undisturbed.ended == 2


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("estimates", [False, True])
def test_training_loaders_are_requested_from_the_state_in_which_they_were(
    every: int, estimates: bool, tmp_path: Path
) -> None:
    class Module(Recording):
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

    def end(path: Path | None = None) -> tuple[int, Any]:
        torch.manual_seed(0)
        module, data = Module(), Requests()
        # Another process has drawn other numbers by now.
        torch.manual_seed(1 if path and every and not estimates else 0)
        saves = Saves(tmp_path)
        run = trainer(max_epochs=3, reload_dataloaders_every_n_epochs=every, callbacks=[saves])
        run.fit(module, datamodule=data, ckpt_path=path)
        return data.requests, module.layer.weight.tolist()

    undisturbed = end()
    for batch in (1, 3, 5):
        assert end(tmp_path / f"on_train_batch_end-{batch:02d}.ckpt") == undisturbed
