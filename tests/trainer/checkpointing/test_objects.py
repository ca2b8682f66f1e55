"""Checkpoints with objects in them: written as Lightning writes them, read as data, created where the user says so."""

import dataclasses
import enum
import functools
import warnings
from argparse import Namespace
from pathlib import Path, PosixPath
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn

from equipoise import CheckpointError, Trainer
from equipoise.safe_loading.stand_in import StandIn, class_in_place_of
from equipoise.trainer.checkpointing.file_reading import read_checkpoint
from equipoise.trainer.checkpointing.objects import warn_of_objects_read
from tests.support.equality import assert_equal
from tests.support.trainer_runs import Data, Small, Validated, loader, saved, trainer

pytestmark = pytest.mark.filterwarnings("ignore:Attribute '.*' is an instance of `nn.Module`")

BOTH = pytest.mark.parametrize("cls", [L.Trainer, Trainer], ids=["lightning", "equipoise"])


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Settings:
    width: int = 8
    colour: Colour = Colour.RED


class Normaliser:
    """A small object with a state, as libraries keep them in hyperparameters."""

    def __init__(self, centre: float) -> None:
        self.centre = torch.tensor(centre)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Normaliser) and torch.equal(self.centre, other.centre)

    __hash__ = None  # type: ignore[assignment]


class Keeping(Small):
    """Takes whatever there is, and keeps it in its hyperparameters."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class Configured(Small):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)


OBJECTS: dict[str, Any] = {
    "class": nn.ReLU,
    "function": nn.functional.relu,
    "partial": functools.partial(torch.optim.SGD, lr=0.1),
    "pair": (1, "two"),
    "enum": Colour.RED,
    "path": Path("data") / "x",
    "nested": Namespace(a=1, b=Namespace(c=[2])),
    "dataclass": Settings(4),
    "set": {3},
    "array": np.arange(3.0),
    "number": np.float32(0.5),
    "config": OmegaConf.create({"lr": 0.1, "double": "${lr}", "sizes": [1, 2]}),
    "structured": OmegaConf.structured(Settings),
    "list": OmegaConf.create([1, {"a": 2}]),
    "dictionary": {"cls": nn.Linear, "in_features": 2},
    "normaliser": Normaliser(2.0),
    "size": torch.Size([1, 2]),
    "none": None,
}


def same(first: Any, second: Any) -> bool:
    if isinstance(first, functools.partial):
        return isinstance(second, functools.partial) and first.func is second.func and first.keywords == second.keywords
    if isinstance(first, np.ndarray):
        return type(first) is type(second) and first.dtype == second.dtype and bool((first == second).all())
    return type(first) is type(second) and bool(first == second)


# Hyperparameters


def test_both_trainers_write_the_same_hyperparameters(tmp_path: Path) -> None:
    stored = []
    for cls in (L.Trainer, Trainer):
        path = saved(Keeping(**OBJECTS), tmp_path, cls)
        checkpoint = torch.load(path, weights_only=False)
        stored.append({key: value for key, value in checkpoint.items() if "param" in key})
    assert list(stored[0]) == list(stored[1])
    assert all(same(value, stored[1]["hyper_parameters"][key]) for key, value in stored[0]["hyper_parameters"].items())


@pytest.mark.parametrize(
    ("config", "kind"),
    [({"lr": 0.5}, dict), (Namespace(lr=0.5), dict), (OmegaConf.create({"lr": 0.5}), DictConfig)],
    ids=["dict", "Namespace", "DictConfig"],
)
def test_hyperparameters_as_a_whole(config: Any, kind: type, tmp_path: Path) -> None:
    again = Configured.load_from_checkpoint(saved(Configured(config), tmp_path), weights_only=False)
    assert again.hparams.lr == 0.5
    assert isinstance(again.hparams, kind)


def test_hyperparameters_of_a_data_module(tmp_path: Path) -> None:
    class WithData(Data):
        def __init__(self, folder: Any, transform: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    run = trainer()
    run.fit(Validated(), datamodule=WithData(Path("data"), nn.Identity()))
    run.save_checkpoint(tmp_path / "x.ckpt")
    again = WithData.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    assert again.hparams["folder"] == Path("data")
    assert type(again.hparams["transform"]) is nn.Identity


@BOTH
def test_a_run_goes_on_with_stand_ins_for_objects_in_hyperparameters(cls: Any, tmp_path: Path) -> None:
    """The trainer does not use them: what is no data is a stand-in there, and nobody is warned."""
    path = saved(Keeping(**OBJECTS), tmp_path, cls)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*objects")
        run = trainer(max_epochs=2)
        run.fit(Keeping(**OBJECTS), loader(), ckpt_path=path)
    assert run.global_step == 6
    stored = read_checkpoint(path)["hyper_parameters"]
    for name in ("pair", "path", "set", "array", "number", "config", "list", "size", "none"):
        assert same(OBJECTS[name], stored[name]), name
    assert type(stored["path"]) is PosixPath
    assert OmegaConf.to_container(stored["config"], resolve=True) == {"lr": 0.1, "double": 0.1, "sizes": [1, 2]}
    assert type(stored["list"]) is ListConfig
    assert stored["structured"].width == 8
    names = {
        "class": "torch.nn.modules.activation.ReLU",
        "partial": "functools.partial",
        "enum": f"{__name__}.Colour",
        "normaliser": f"{__name__}.Normaliser",
        "dataclass": f"{__name__}.Settings",
    }
    assert {name: class_in_place_of(stored[name]) for name in names} == names
    assert class_in_place_of(stored["dictionary"]["cls"]) == "torch.nn.modules.linear.Linear"
    assert stored["dictionary"]["in_features"] == 2


class Forecaster(Small):
    """Keeps an object in its hyperparameters, and adds it to the checkpoint by itself, as libraries do."""

    def __init__(self, normaliser: Any) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["special"] = {"output": self.hparams["normaliser"]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.centre_of_file = checkpoint["special"]["output"].centre


def forecaster() -> Forecaster:
    return Forecaster(Normaliser(1.5))


@BOTH
def test_a_hook_that_needs_the_object(cls: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no plain data")
        path = saved(forecaster(), tmp_path, cls)
    again = trainer(max_epochs=2)
    with pytest.warns(UserWarning, match="not created"), pytest.raises(CheckpointError) as caught:
        again.fit(forecaster(), loader(), ckpt_path=path)
    for part in (f"{__name__}.Normaliser", "attribute `centre`", "weights_only=False", "add_safe_globals"):
        assert part in str(caught.value)
    module, again = forecaster(), trainer(max_epochs=2)
    with pytest.warns(UserWarning, match=r"weights_only=False: the code .* is run") as warned:
        again.fit(module, loader(), ckpt_path=path, weights_only=False)
    assert len([one for one in warned if "weights_only=False" in str(one.message)]) == 1
    assert module.centre_of_file == 1.5
    assert again.global_step == 6


def test_an_object_that_resumption_will_not_create_is_named_when_written_and_may_be_allowed(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=rf"'special'\['output'\] \({__name__}.Normaliser\)") as warned:
        path = saved(forecaster(), tmp_path)
    assert len([one for one in warned if "no plain data" in str(one.message)]) == 1
    module = forecaster()
    with torch.serialization.safe_globals([Normaliser]):
        trainer().test(module, loader(), ckpt_path=path, verbose=False)
    assert module.centre_of_file == 1.5


# States of callbacks, of data modules, of whatever hooks add


class Remembering(Callback):
    """Has a state with something in it."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept, "count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]
        self.count = state["count"]


def saved_with(kept: Any, path: Path, cls: Any = Trainer) -> Path:
    """Write a checkpoint of which the state of a callback holds something; ours warns once, Lightning does not."""
    run = trainer(cls, callbacks=Remembering(kept))
    run.fit(Small(), loader())
    if cls is Trainer:
        kind = "somewhere.Thing" if isinstance(kept, StandIn) else f"{__name__}.{type(kept).__name__}"
        with pytest.warns(UserWarning, match=rf"no plain data: 'callbacks'\['Remembering'\]\['kept'\] \({kind}\)"):
            run.save_checkpoint(path)
    run.save_checkpoint(path)
    return path


@BOTH
def test_an_object_in_the_state_of_a_callback(cls: Any, tmp_path: Path) -> None:
    path = saved_with(Colour.RED, tmp_path / "x.ckpt", cls)
    callback = Remembering(None)
    with pytest.warns(UserWarning, match="not created"):
        trainer(max_epochs=2, callbacks=callback).fit(Small(), loader(), ckpt_path=path)
    assert isinstance(callback.kept, StandIn)
    assert callback.count == 3
    callback = Remembering(None)
    with pytest.warns(UserWarning, match="is run"):
        trainer(max_epochs=2, callbacks=callback).fit(Small(), loader(), ckpt_path=path, weights_only=False)
    assert callback.kept is Colour.RED


def kept_in(path: Path) -> Any:
    """The state of the callback in a checkpoint."""
    (state,) = read_checkpoint(path)["callbacks"].values()
    return state["kept"]


@dataclasses.dataclass(slots=True)
class Slotted:
    centre: float


def test_an_object_of_slots_alone_can_be_allowed_by_name(tmp_path: Path) -> None:
    path = saved_with(Slotted(1.5), tmp_path / "x.ckpt")
    with torch.serialization.safe_globals([Slotted]):
        kept = kept_in(path)
    assert type(kept) is Slotted
    assert kept.centre == 1.5


def test_a_stand_in_that_is_written_again_is_read_as_one(tmp_path: Path) -> None:
    path = saved_with(StandIn("somewhere", "Thing"), tmp_path / "x.ckpt")
    assert class_in_place_of(kept_in(path)) == "somewhere.Thing"


def test_numbers_of_numpy_in_an_optimiser(tmp_path: Path) -> None:
    """A schedule computed with numpy leaves them in the state of the optimiser."""

    class Scheduled(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=np.float64(0.05))  # type: ignore[arg-type]

    path = saved(Scheduled(), tmp_path)
    run = trainer(max_epochs=2)
    run.fit(Scheduled(), loader(), ckpt_path=path)
    assert run.optimizers[0].param_groups[0]["lr"] == 0.05


# The flag


class Recording(TorchCheckpointIO):
    """Remembers the flag; reads by torch."""

    def __init__(self) -> None:
        self.flags: list[Any] = []

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        self.flags.append(weights_only)
        return super().load_checkpoint(path, weights_only=weights_only)


def test_a_plugin_gets_the_flag(tmp_path: Path) -> None:
    path = saved(Keeping(kind=nn.ReLU), tmp_path)
    plugin = Recording()
    with pytest.raises(CheckpointError, match=r"Recording cannot read .* with weights_only=True.*weights_only=False"):
        trainer(plugins=plugin).test(Keeping(), loader(), ckpt_path=path)
    with pytest.warns(UserWarning, match="is run"):
        trainer(plugins=plugin).test(Keeping(), loader(), ckpt_path=path, weights_only=False, verbose=False)
    assert plugin.flags == [True, False]


@pytest.mark.parametrize("plugin", [TorchCheckpointIO, AsyncCheckpointIO])
def test_lightnings_own_plugins_read_as_safely_as_none(plugin: Any, tmp_path: Path) -> None:
    path = saved(Keeping(kind=nn.ReLU), tmp_path)
    again = trainer(plugins=plugin(), max_epochs=2)
    again.fit(Keeping(), loader(), ckpt_path=path)
    assert again.global_step == 6


# Formats


def content() -> dict[str, Any]:
    weights = torch.arange(6.0).reshape(2, 3)
    parameter = nn.Parameter(torch.ones(2))
    parameter.tag = "mine"  # type: ignore[attr-defined]
    return {
        "state_dict": {"a": weights, "row": weights[1], "turned": weights.t(), "none": torch.empty(0), "p": parameter},
        "kinds": [torch.ones(2, dtype=kind) for kind in (torch.bfloat16, torch.int8, torch.bool, torch.complex64)],
        "new": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "values": [1, 2.5, None, True, "é", b"x", bytearray(b"y"), 1j, 10**30, -5, (1,), {2}, frozenset([3])],
        "torch": [torch.float32, torch.strided, torch.Size([1]), torch.device("cpu"), torch.empty(3, device="meta")],
        "objects": [nn.L1Loss(), nn.ReLU, print, Colour.RED],
    }


@pytest.mark.parametrize("protocol", [2, 5])
def test_protocols(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save(content(), path, pickle_protocol=protocol)
    read, expected = read_checkpoint(path), content()
    objects, meta = read.pop("objects"), read["torch"].pop()
    expected["torch"].pop()
    expected.pop("objects")
    assert_equal(expected, read)
    assert meta.is_meta
    assert meta.shape == (3,)
    state = read["state_dict"]
    assert state["a"].data_ptr() == state["turned"].data_ptr() == state["row"].data_ptr() - 12
    assert state["p"].tag == "mine"
    names = ["torch.nn.modules.loss.L1Loss", "torch.nn.modules.activation.ReLU", "builtins.print", f"{__name__}.Colour"]
    assert [class_in_place_of(one) for one in objects] == names


@pytest.mark.parametrize(("count", "end"), [(5, "). Using one"), (6, ") and 1 more. Using one")])
def test_at_most_five_objects_are_listed(count: int, end: str) -> None:
    objects = {str(number): StandIn(__name__, "Colour") for number in range(count)}
    with pytest.warns(UserWarning, match="not created") as warned:
        warn_of_objects_read({"kept": objects}, fitting=True)
    assert f"['4'] ({__name__}.Colour{end}" in str(warned[0].message)
