"""Torch's flags, plugins, and where modules are created."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.precision import make_precision
from equipoise.trainer.settings.precision import module_init_context, set_torch_flags
from tests.support.trainer_runs import trainer


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's flags as they are by default, and as they were afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)  # whatever was there before comes back with monkeypatch


@pytest.mark.parametrize(
    ("deterministic", "benchmark", "expected"),
    [
        (None, None, (False, False, True)),
        (True, None, (True, False, False)),
        ("warn", None, (True, True, False)),
        (True, True, (True, False, True)),
        (False, None, (False, False, True)),
        (None, False, (False, False, False)),
    ],
)
@pytest.mark.usefixtures("flags")
def test_torchs_flags_are_set(deterministic: Any, benchmark: Any, expected: tuple[bool, bool, bool]) -> None:
    set_torch_flags(deterministic, benchmark)
    enabled = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    assert (*enabled, torch.backends.cudnn.benchmark) == expected
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)


@pytest.mark.usefixtures("flags")
def test_a_cublas_workspace_that_was_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    trainer(deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
@pytest.mark.parametrize("empty", [False, True])
def test_init_module_makes_modules_in_the_dtype_and_on_the_device_of_the_run(precision: str, empty: bool) -> None:
    state = torch.get_rng_state()
    with trainer(precision=precision).init_module(empty_init=empty):
        layer = torch.nn.Linear(2, 2)
    assert layer.weight.dtype == {"32-true": torch.float32, "64-true": torch.float64}.get(precision, torch.bfloat16)
    assert torch.equal(state, torch.get_rng_state()) == empty
    with module_init_context(
        SimpleNamespace(root_device=torch.device("meta")), make_precision(None, "cpu"), empty=empty
    ):
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"
    assert torch.get_default_dtype() is torch.float32
