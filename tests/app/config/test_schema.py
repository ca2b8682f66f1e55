"""Structured configurations say what constructors say: the same names, defaults and types."""

import dataclasses
import inspect
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import equipoise
import equipoise.app.compose  # registers the structured configurations
from equipoise.app.config.schema import config_class, option_name


class Shade(Enum):
    DARK = "dark"


class Example:
    def __init__(
        self,
        required: int,
        optional: int | None = None,
        old_style: Optional[float] = None,  # noqa: UP045
        number: int | float = 1,
        choice: Literal["a", "b"] = "a",
        path: str | Path = "here",
        only_path: Path | None = None,
        sizes: dict[str, int] = {"a": 1},  # noqa: B006
        devices: list[int] | str | int = "auto",
        anything: Any = None,
        unannotated=3,
        enum: Shade = Shade.DARK,
        device: torch.device | str = torch.device("cpu"),  # noqa: B008
        written: "int" = 1,
        function: Any = len,
        *args: int,
        keyword: bool = False,
        **kwargs: int,
    ) -> None: ...


FIELDS = {field.name: field for field in dataclasses.fields(config_class(Example))}
CONFIG = OmegaConf.structured(config_class(Example))


def test_names_and_defaults_follow_the_signature():
    assert list(FIELDS) == [
        "_target_",
        *(name for name in inspect.signature(Example).parameters if name not in ("function", "args", "kwargs")),
    ]
    assert CONFIG._target_ == f"{__name__}.Example"
    assert FIELDS["required"].default == MISSING
    assert OmegaConf.is_missing(CONFIG, "required")
    expected = {
        name: parameter.default
        for name, parameter in inspect.signature(Example).parameters.items()
        if name in FIELDS and name != "required"
    } | {"enum": "dark", "device": "cpu"}
    values = OmegaConf.to_container(CONFIG)
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("key", "good", "converted", "bad"),
    [
        ("required", "3", 3, "x"),
        ("optional", "3", 3, "x"),
        ("old_style", 1, 1.0, "x"),
        ("path", 2024, "2024", ["x"]),
        ("only_path", 2024, "2024", ["x"]),
        ("written", "8", 8, "x"),
        ("keyword", "yes", True, "x"),
    ],
)
def test_values_of_plain_types_are_converted(key: str, good: Any, converted: Any, bad: Any):
    value = OmegaConf.merge(CONFIG, {key: good})[key]
    assert (value, type(value)) == (converted, type(converted))
    with pytest.raises(OmegaConfBaseException):
        OmegaConf.merge(CONFIG, {key: bad})


@pytest.mark.parametrize("key", [name for name, field in FIELDS.items() if field.type is Any and name != "sizes"])
def test_values_of_other_types_stay_as_they_were_written(key: str):
    for value in (1, 1.0, "x", [1, "x"], {"x": [1]}):
        kept = OmegaConf.to_container(OmegaConf.merge(CONFIG, {key: value}))[key]
        assert (kept, type(kept)) == (value, type(value))


def test_mutable_defaults_are_not_shared():
    first, second = config_class(Example)(required=1), config_class(Example)(required=1)
    first.sizes["b"] = 2
    assert second.sizes == {"a": 1}


def test_every_argument_of_the_trainer_can_be_configured():
    store = ConfigStore.instance().load("trainer/trainer.yaml").node
    arguments = set(inspect.signature(equipoise.Trainer).parameters) - {"strategy", "callbacks", "logger"}
    assert {str(key) for key in store} == {"_target_"} | arguments


def test_every_strategy_and_callback_with_a_public_name_can_be_chosen():
    names = [getattr(equipoise, name) for name in equipoise.__all__]
    public = [each for each in names if isinstance(each, type)]
    strategies = {cls.name for cls in public if issubclass(cls, equipoise.Strategy)} - {""}
    assert {f"{name}.yaml" for name in strategies} <= set(ConfigStore.instance().list("strategy"))
    callbacks = {option_name(c) for c in public if issubclass(c, lightning_callbacks.Callback)} - {"callback"}
    assert {"run_summary", "progress_bar"} <= callbacks
    # A program gives it the trial of its study, which no configuration has.
    callbacks.remove("optuna_pruning")
    assert {f"{name}.yaml" for name in callbacks} <= set(ConfigStore.instance().list("callbacks"))


@pytest.mark.parametrize(
    "name",
    [
        *("model_checkpoint", "timer", "stochastic_weight_averaging", "ema_weight_averaging"),
        *("rich_model_summary", "gradient_accumulation_scheduler"),
    ],
)
def test_lightnings_callbacks_build_from_their_defaults(name):
    import hydra

    node = ConfigStore.instance().load(f"callbacks/{name}.yaml").node
    given = {"monitor": "val_loss", "scheduling": {0: 1}, "swa_lrs": 0.1}
    values = OmegaConf.to_container(node) | {
        key: value for key, value in given.items() if OmegaConf.is_missing(node, key)
    }
    assert option_name(type(hydra.utils.instantiate(values, _convert_="all"))) == name


def test_precisions_are_those_of_the_trainer():

    from equipoise.precision import make_precision

    options = {path.stem for path in Path(equipoise.__file__).parent.glob("conf/precision/*.yaml")}
    assert {make_precision(name, "cpu").name for name in options} == options
    with pytest.raises(equipoise.ConfigurationError) as refused:
        make_precision("nonsense", "cpu")
    assert all(name in str(refused.value) for name in options)
