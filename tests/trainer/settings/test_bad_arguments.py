"""Arguments of the Trainer that cannot work, or contradict one another, are refused when it is made."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch.optim import LBFGS

from equipoise import SingleDeviceStrategy, Trainer
from tests.support.trainer_runs import Small, loader, refuses, refuses_fit, trainer, with_optimizers

# The class of an error


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.parametrize("cls", [L.Trainer, Trainer], ids=["Lightning", "Equipoise"])
@pytest.mark.parametrize(
    ("error", "call"),
    [
        (TypeError, lambda cls: cls(accelerator="cpu", devices=["0"])),
        (RuntimeError, lambda cls: cls(callbacks=[EarlyStopping("a"), EarlyStopping("a", patience=5)])),
        (TypeError, lambda cls: trainer(cls, max_epochs=1).fit(Small(), object())),
        (TypeError, lambda cls: cls(gradient_clip_val=(1, 2))),
        (TypeError, lambda cls: cls(accelerator="cpu", logger=False).validate()),
    ],
    ids=["devices", "callbacks", "loader", "clipping", "no module"],
)
def test_an_error_is_also_what_lightning_raises(cls: Any, error: type[Exception], call: Callable[[Any], Any]) -> None:
    with pytest.raises(error):
        call(cls)


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    # Devices
    ({"accelerator": "tpu"}, ["accelerator='tpu': TPUs are not supported", "Take one of 'auto', 'cpu'"]),
    ({"accelerator": "xpu"}, ["accelerator='xpu': Intel's GPUs are not supported"]),
    ({"accelerator": "CPU"}, ["not 'CPU'", "Did you mean 'cpu'?"]),
    ({"accelerator": None}, ["accelerator must be one of", "not None"]),
    ({"strategy": "single_device", "devices": 2}, ["takes one device", "2 were given: cpu, cpu", "devices=1"]),
    ({"devices": 0}, ["devices=0", "at least 1"]),
    ({"devices": [-1]}, ["there is no cpu device -1", "torch finds"]),
    ({"devices": []}, ["devices=[]", "a count"]),
    ({"devices": "1,x"}, ["devices='1,x'", "[0, 2]"]),
    ({"devices": "cuda:0"}, ["devices='cuda:0'", "['cuda:0', 'cpu']"]),
    ({"devices": 1.5}, ["devices=1.5", "a count"]),
    ({"devices": True}, ["devices=True", "a count"]),
    ({"devices": [True]}, ["devices=[True]", "a count"]),
    ({"devices": ["gpu:0"]}, ["devices=['gpu:0']", "'cuda:0'"]),
    (
        {"devices": ["cuda:0"]},
        ["accelerator='cpu' does not fit", "cuda:0 is no cpu device", "leave accelerator out"],
    ),
    ({"devices": ["meta"], "accelerator": "auto"}, ["device meta does not exist", "torch finds"]),
    ({"num_nodes": 0}, ["num_nodes", "at least 1", "not 0"]),
    ({"num_nodes": 2}, ["runs on one machine", "num_nodes=2", "Leave it out"]),
    # Names and numbers
    ({"strategy": "single_devic"}, ["not 'single_devic'", "Did you mean 'single_device'?"]),
    ({"strategy": SingleDeviceStrategy}, ["SingleDeviceStrategy()", "not the class"]),
    ({"strategy": None}, ["strategy must be a name", "not None"]),
    ({"precision": 8}, ["'bf16-mixed'", "8 was given"]),
    ({"profiler": "simpel"}, ["'simple', 'advanced', 'pytorch'", "Did you mean 'simple'?"]),
    ({"profiler": 3}, ["profiler must be", "not 3"]),
    ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "nrom"}, ["'norm', 'value'", "Did you mean 'norm'?"]),
    ({"gradient_clip_val": -1}, ["from 0", "None for no clipping", "not -1"]),
    ({"gradient_clip_val": "1"}, ["not '1'"]),
    ({"gradient_clip_val": float("nan")}, ["not nan"]),
    ({"gradient_clip_val": True}, ["not True"]),
    ({"deterministic": "yes"}, ["True, False, 'warn' or None", "not 'yes'"]),
    ({"benchmark": "x"}, ["benchmark must be True or False", "not 'x'"]),
    ({"detect_anomaly": 1}, ["detect_anomaly must be True or False", "not 1"]),
    ({"detect_nonfinite": 1}, ["detect_nonfinite must be True or False", "not 1"]),
    ({"fused_optimizer": "yes"}, ["fused_optimizer must be True or False", "not 'yes'"]),
    ({"inference_mode": "off"}, ["inference_mode must be True or False", "not 'off'"]),
    ({"enable_checkpointing": ModelCheckpoint()}, ["enable_checkpointing must be True or False"]),
    ({"enable_progress_bar": "no"}, ["enable_progress_bar must be True or False", "not 'no'"]),
    ({"barebones": "yes"}, ["barebones must be True or False"]),
    ({"logger": ["csv"]}, ["CSVLogger('logs')", "not 'csv'"]),
    ({"logger": 3}, ["True, False", "not 3"]),
    ({"callbacks": 3}, ["a list of them", "3 of type int"]),
    ({"callbacks": ["early_stopping"]}, ["'early_stopping' of type str"]),
    ({"callbacks": [EarlyStopping]}, ["the class EarlyStopping", "EarlyStopping(...)"]),
    ({"plugins": [3]}, ["CheckpointIO", "int"]),
    (
        {"plugins": [TorchCheckpointIO(), TorchCheckpointIO()]},
        ["another CheckpointIO", "one can be used"],
    ),
    ({"default_root_dir": 3}, ["default_root_dir must be a path", "not 3"]),
    ({"default_root_dir": Path("s3://bucket/run")}, ["'s3:/bucket/run' was a URL", "'s3://...'"]),
    ({"default_root_dir": "nowhere://run"}, ["'nowhere://run' cannot be used", "nowhere"]),
    ({"max_time": "12"}, ["'DD:HH:MM:SS'", "max_time", "not '12'"]),
    ({"max_time": {"days": 1e12}}, ["'DD:HH:MM:SS'", "max_time"]),
    ({"max_time": {1: 2}}, ["'DD:HH:MM:SS'", "max_time"]),
    ({"max_time": timedelta(seconds=-1)}, ["max_time", "must not be negative"]),
    ({"val_check_interval": "3"}, ["val_check_interval", "'DD:HH:MM:SS'", "not '3'"]),
    ({"val_check_interval": 0}, ["would never validate", "limit_val_batches=0"]),
    ({"check_val_every_n_epoch": 0}, ["check_val_every_n_epoch", "at least 1", "or None", "not 0"]),
    ({"max_steps": None}, ["max_steps", "-1 for no limit", "not None"]),
    # Contradictions
    ({"min_epochs": 3, "max_epochs": 2}, ["min_epochs=3 exceeds max_epochs=2"]),
    ({"min_steps": 3, "max_steps": 2}, ["min_steps=3 exceeds max_steps=2"]),
    ({"check_val_every_n_epoch": None}, ["over epochs", "an integer or a time", "not None"]),
    ({"check_val_every_n_epoch": None, "val_check_interval": 0.5}, ["an integer or a time", "not 0.5"]),
    ({"callbacks": [TQDMProgressBar()]}, ["enable_progress_bar=False", "TQDMProgressBar", "one of them"]),
    ({"callbacks": [ModelCheckpoint()]}, ["enable_checkpointing=False", "ModelCheckpoint", "one of them"]),
    (
        {"callbacks": [TQDMProgressBar(), RichProgressBar()], "enable_progress_bar": True},
        ["one progress bar", "TQDMProgressBar, RichProgressBar"],
    ),
    (
        {"callbacks": [EarlyStopping("a"), EarlyStopping("a", patience=5)]},
        ["the same key", "'monitor': 'a'", "`state_key`"],
    ),
]


@pytest.mark.parametrize(
    ("options", "parts"), REFUSED, ids=lambda value: ", ".join(value) if isinstance(value, dict) else ""
)
def test_arguments_that_cannot_work_are_refused(options: dict[str, Any], parts: list[str]) -> None:
    refuses(lambda: trainer(**options), *parts)


# Devices


def test_devices_that_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two CUDA devices to be found."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refuses(
        lambda: trainer(accelerator="cuda", devices=3), "devices=3", "more devices than there are", "2 CUDA devices"
    )
    refuses(lambda: trainer(accelerator="cuda", devices=[0, 5]), "no cuda device 5", "2 CUDA devices")
    refuses(lambda: trainer(accelerator="auto", devices=["cuda:2"]), "cuda:2 does not exist", "2 CUDA devices")


@pytest.mark.parametrize("accelerator", ["gpu", "cuda", "mps"])
def test_an_accelerator_that_this_machine_lacks(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    refuses(lambda: trainer(accelerator=accelerator), f"accelerator={accelerator!r}", "'auto'", "'cpu'")


# Numbers


COUNTS = {
    "max_epochs": 0,
    "min_epochs": 0,
    "max_steps": 0,
    "min_steps": 0,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 0,
    "accumulate_grad_batches": 1,
    "reload_dataloaders_every_n_epochs": 0,
    "check_val_every_n_epoch": 1,
    "fast_dev_run": 0,
    "num_nodes": 1,
}
LIMITS = [f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", COUNTS)
@given(value=st.one_of(st.integers(max_value=-2), st.floats(), st.text(max_size=3), st.none()))
@example(value=-1.0)
def test_a_count_is_an_integer(name: str, value: Any) -> None:
    if value is None and name not in ("max_steps", "accumulate_grad_batches", "reload_dataloaders_every_n_epochs"):
        return
    refuses(lambda: trainer(**{name: value}), name, f"an integer of at least {COUNTS[name]}", f"not {value!r}")


def test_a_count_is_no_switch() -> None:
    for name in COUNTS.keys() - {"fast_dev_run"}:
        refuses(lambda name=name: trainer(**{name: True}), name, "an integer", "not True")


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", [*LIMITS, "overfit_batches", "val_check_interval"])
@given(
    value=st.one_of(
        st.integers(max_value=-1),
        st.floats(max_value=0, exclude_max=True),
        st.floats(min_value=1, exclude_min=True).filter(lambda value: value % 1 != 0),  # infinity and nan, too
        st.booleans(),
    )
)
def test_a_limit_is_a_number_or_a_fraction(name: str, value: Any) -> None:
    refuses(lambda: trainer(**{name: value}), name, "number of batches", "fraction (0.0 to 1.0)", f"not {value!r}")


# Contradictions


BESIDE_BAREBONES: dict[str, Any] = {
    "logger": CSVLogger("logs"),
    "enable_checkpointing": True,
    "enable_progress_bar": True,
    "enable_model_summary": True,
    "num_sanity_val_steps": 1,
    "log_every_n_steps": 5,
    "fast_dev_run": True,
    "detect_anomaly": True,
    "detect_nonfinite": True,
    "profiler": "simple",
}


@pytest.mark.parametrize(("name", "value"), BESIDE_BAREBONES.items())
def test_barebones_contradicts_other_arguments(name: str, value: Any) -> None:
    refuses(lambda: Trainer(barebones=True, **{name: value}), "barebones=True", f"{name}=", "Leave one")


def test_barebones_contradicts_callbacks() -> None:
    refuses(lambda: Trainer(barebones=True, callbacks=[TQDMProgressBar()]), "barebones=True", "TQDMProgressBar")


@pytest.mark.parametrize("option", [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}], ids=str)
def test_manual_optimisation_clips_and_accumulates_by_hand(option: dict[str, Any]) -> None:
    module = Small()
    module.automatic_optimization = False
    (name,) = option
    refuses_fit(module, "automatic_optimization=False", f"Trainer({name}={option[name]})", "Leave it out", **option)


def test_lbfgs_with_scaled_losses_is_refused() -> None:
    module = with_optimizers(lambda m: LBFGS(m.parameters()))
    refuses_fit(module, "16-mixed", "LBFGS", "bf16-mixed", precision="16-mixed")


@pytest.mark.parametrize("filename", ["../{epoch}", "/tmp/{epoch}", "..\\x"])
def test_a_checkpoint_outside_of_its_folder_is_refused(filename: str, tmp_path: Any) -> None:
    refuses_fit(
        Small(),
        "filename of a ModelCheckpoint",
        "Give the folder as dirpath",
        callbacks=[ModelCheckpoint(tmp_path, filename=filename)],
        enable_checkpointing=True,
    )


def test_a_checkpoint_may_have_dots_and_folders_in_its_name(tmp_path: Any) -> None:
    """Dots in a name, and folders of a metric's name, stay inside."""
    callback = ModelCheckpoint(tmp_path, filename="{epoch}..{val/loss:.2f}")
    trainer(callbacks=[callback], enable_checkpointing=True).fit(Small(), loader())
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.ckpt")] == ["epoch=0..val/loss=0.00.ckpt"]
