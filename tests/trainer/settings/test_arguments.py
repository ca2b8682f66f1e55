"""The arguments of the Trainer: their defaults, their bounds, what they imply."""

import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.enums import GradClipAlgorithmType

from equipoise import ConfigurationError, Trainer
from equipoise.trainer.settings import arguments
from tests.support.trainer_runs import Small, loader, trainer

LIGHTNINGS_ALONE = {"model_registry"}  # of Lightning's own cloud
OURS_ALONE = {
    "offload_activations": False,
    "step_in_backward": False,
    "activation_checkpointing": None,
    "capture": False,
    "compile": False,
    "detect_nonfinite": None,
    "fused_optimizer": False,
    "prefetch": "auto",
    "verify": 0,
}
FOLLOWS_FROM_THE_PLACE = "num_nodes"  # 1 in Lightning; here nothing was said

# The Trainer as a whole


def parameters_of(cls: type) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(cls).parameters.items() if name != "self"}


def test_arguments_and_defaults_are_lightnings() -> None:
    theirs, ours = parameters_of(L.Trainer), parameters_of(Trainer)
    assert set(theirs) - set(ours) == LIGHTNINGS_ALONE
    assert {name: ours[name].default for name in set(ours) - set(theirs)} == OURS_ALONE
    both = set(ours) & set(theirs) - {FOLLOWS_FROM_THE_PLACE}
    assert {name: ours[name].default for name in both} == {name: theirs[name].default for name in both}
    assert ours[FOLLOWS_FROM_THE_PLACE].default is None
    assert all(p.kind is p.KEYWORD_ONLY for p in ours.values())


@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict", "save_checkpoint"])
def test_entry_points_are_lightnings(entry: str) -> None:
    theirs, ours = (inspect.signature(getattr(cls, entry)).parameters for cls in (L.Trainer, Trainer))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


CHOICES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "barebones": {"barebones": True},
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run of 3": {"fast_dev_run": 3},
    "overfitting batches": {"overfit_batches": 2},
    "overfitting a fraction": {"overfit_batches": 0.5},
    "endless": {"max_epochs": -1},
    "steps": {"max_steps": 5},
    "time": {"max_time": "00:00:01:00"},
    "time between validations": {"val_check_interval": "00:01:00:00"},
    "batches over epochs": {"val_check_interval": 7, "check_val_every_n_epoch": None},
    "sanity": {"num_sanity_val_steps": -1},
    "limits": {
        "limit_train_batches": 2.0,
        "limit_val_batches": 1,
        "limit_test_batches": 0.5,
        "limit_predict_batches": 0,
    },
    "clipping": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
    "clipping by a type": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": GradClipAlgorithmType.NORM},
    "precision": {"precision": "bf16-mixed"},
}
READ = (
    *("accumulate_grad_batches", "barebones", "check_val_every_n_epoch", "fast_dev_run", "gradient_clip_algorithm"),
    *("gradient_clip_val", "limit_predict_batches", "limit_test_batches", "limit_train_batches", "limit_val_batches"),
    *("log_every_n_steps", "max_epochs", "max_steps", "num_sanity_val_steps", "overfit_batches", "precision"),
    "val_check_interval",
)


def read(run: Any) -> dict[str, Any]:
    """Return the options that can be read from a trainer."""
    kinds = [type(callback).__name__.removeprefix("Rich").removeprefix("Whole") for callback in run.callbacks]
    return {
        **{name: getattr(run, name, None) for name in READ},
        "type of clipping": type(run.gradient_clip_algorithm),
        "loggers": [type(logger).__name__ for logger in run.loggers],
        "callbacks": sorted("ProgressBar" if kind == "TQDMProgressBar" else kind for kind in kinds),
        "time": [callback.time_remaining() for callback in run.callbacks if isinstance(callback, Timer)],
    }


@pytest.mark.quick_cases(6)
@pytest.mark.filterwarnings(
    "ignore:`max_epochs` was not set", "ignore:Precision bf16-mixed is not supported by the model summary"
)
@pytest.mark.parametrize("name", CHOICES)
def test_what_options_imply_is_lightnings(name: str, tmp_path: Path) -> None:
    theirs, ours = (
        read(cls(accelerator="cpu", default_root_dir=tmp_path, **CHOICES[name])) for cls in (L.Trainer, Trainer)
    )
    if name == "time between validations":
        # Lightning keeps the time under a private name.
        assert (theirs.pop("val_check_interval"), ours.pop("val_check_interval")) == (None, 1.0)
    assert theirs == ours


# One by one


@pytest.mark.parametrize(("given", "meaning"), [(1, "one batch"), (1.0, "all batches")])
def test_the_meaning_of_a_limit_of_one_is_logged(given: Any, meaning: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        arguments.check_batch_limit("limit_val_batches", given)
    assert f"limit_val_batches={given!r} means {meaning}" in caplog.text


@given(
    days=st.integers(0, 9999),
    hours=st.integers(0, 99),
    minutes=st.integers(0, 99),
    seconds=st.integers(0, 99),
    form=st.sampled_from(["text", "timedelta", "dictionary"]),
)
def test_a_time_in_each_form(days: int, hours: int, minutes: int, seconds: int, form: str) -> None:
    parts = {"days": days, "hours": hours, "minutes": minutes, "seconds": seconds}
    value: Any = {
        "text": f" {days:02}:{hours:02}:{minutes:02}:{seconds:02}",
        "timedelta": timedelta(**parts),
        "dictionary": parts,
    }[form]
    assert arguments.seconds_of("max_time", value) == ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def test_the_default_of_max_epochs_warns() -> None:
    run = trainer(max_epochs=None, limit_train_batches=0)
    with pytest.warns(UserWarning, match=r"`max_epochs` was not set: training ends after 1000 epochs.*max_epochs=-1"):
        run.fit(Small(), loader())
    assert run.max_epochs == 1000


# Environment variables


@pytest.mark.parametrize("cls", [L.Trainer, Trainer], ids=["Lightning", "Equipoise"])
def test_environment_variables_give_arguments_that_are_left_out(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"LOGGER": "False", "MAX_STEPS": "7", "MAX_EPOCHS": "3", "PRECISION": "bf16-mixed", "MIN_EPOCHS": ""}
    for name, value in variables.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", value)
    run = cls(accelerator="cpu", max_epochs=5)
    assert (run.logger, run.max_steps, run.max_epochs, run.precision) == (None, 7, 5, "bf16-mixed")
    assert run.min_epochs == cls(accelerator="cpu", min_epochs=None).min_epochs


# Arguments that Lightning alone has


def test_an_argument_of_lightning_without_effect_is_ignored() -> None:
    with pytest.warns(UserWarning, match="ignores Lightning's argument 'suggest_integrations', which has no effect"):
        made = Trainer(suggest_integrations=True, max_epochs=3)  # type: ignore[call-arg]
    assert made.constructor_arguments == {"max_epochs": 3}
    with pytest.warns(UserWarning, match="ignores Lightning's argument 'model_registry'"):
        Trainer(model_registry=None)  # type: ignore[call-arg]


def test_an_argument_that_lightning_alone_has_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigurationError, match=r"does not have Lightning's argument 'model_registry', and .*Leave it"
    ):
        Trainer(model_registry="mine")  # type: ignore[call-arg]
