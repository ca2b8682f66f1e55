"""QLoRA and float8 on two CPU devices: under each strategy the run is that of one device, also one that is resumed."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from equipoise import Float8Training, Quantization
from tests.extensions.quantization.qlora import Full, QLoRA, difference, stored
from tests.extensions.quantization.runs import fit, saving
from tests.support.equality import assert_equal

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated",
    "ignore:Ranks from 1 on begin with",
    "ignore:The run began with",
    "ignore:The checkpoint holds states of callbacks",
    "ignore:FSDP2-wrapped module",
)


@cache
def on_one_device(kind: Any, epochs: int = 1) -> QLoRA:
    return fit(QLoRA(), Quantization(kind), max_epochs=epochs)


def check_equal(module: QLoRA, expected: QLoRA, largest: float) -> None:
    """Check that adapters are equal, and base weights to the bit."""
    assert difference(module, expected) <= largest
    assert_equal(stored(expected), stored(module))


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        *(("dp", "nf4"), ("dp", "int8")),
        pytest.param("ddp", "int8", marks=pytest.mark.slow),
        pytest.param("fsdp", "nf4", marks=pytest.mark.slow),
        pytest.param("fsdp", "int8", marks=pytest.mark.slow),
        pytest.param("pipeline", "nf4", marks=pytest.mark.slow),
        pytest.param("pipeline, processes", "int8", marks=pytest.mark.slow),
    ],
)
def test_adapters_are_those_of_one_device(strategy: str, kind: Any) -> None:
    module = fit(QLoRA(), Quantization(kind), strategy=strategy)
    check_equal(module, on_one_device(kind), 1e-12)
    assert difference(module, QLoRA()) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        *(("dp", "int8"), ("ddp", "nf4"), ("fsdp", "int8"), ("fsdp, sharded", "nf4"), ("pipeline, processes", "nf4")),
    ],
)
def test_a_resumed_run_ends_as_an_undisturbed_one(strategy: str, kind: Any, tmp_path: Path) -> None:
    """It goes on within the second of three epochs."""
    options: dict[str, Any] = {"strategy": strategy, "max_epochs": 3, "enable_checkpointing": True}
    undisturbed = fit(QLoRA(), Quantization(kind), saving(tmp_path), **options)
    resumed = fit(QLoRA(), Quantization(kind), strategy=strategy, path=tmp_path / "step=5.ckpt", max_epochs=3)
    check_equal(resumed, undisturbed, 0)
    # Another strategy continues the run, with the second epoch.
    alone = fit(QLoRA(), Quantization(kind), path=tmp_path / "step=3.ckpt", max_epochs=3)
    check_equal(alone, on_one_device(kind, 3), 1e-12)


def float8(recipe: Any, precision: str, strategy: str) -> Any:
    return fit(Full(), Float8Training(recipe, emulate=True), strategy=strategy, precision=precision)


@cache
def float8_on_one_device(recipe: str, precision: str) -> Any:
    return float8(recipe, precision, "single_device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "precision", "strategy"),
    [
        *(
            ("tensorwise", "fp8", "dp"),
            ("tensorwise", "fp8-true", "fsdp"),
            ("tensorwise", "fp8-true", "pipeline, processes"),
        ),
        *(("rowwise", "32-true", "ddp"), ("rowwise", "32-true", "pipeline")),
    ],
)
def test_float8_is_near_that_of_one_device(recipe: str, precision: str, strategy: str) -> None:
    alone, module = float8_on_one_device(recipe, precision), float8(recipe, precision, strategy)
    # All values of a part of the batch share a scale by "tensorwise".
    largest = 0.1 if recipe == "tensorwise" else 1e-3
    assert difference(module, alone) < largest
    assert difference(module, Full().to(next(module.parameters()).dtype)) > 0.001
    assert list(map(type, module.modules())) == list(map(type, alone.modules()))
