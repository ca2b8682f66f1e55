"""QLoRA on two CPU devices: under each strategy adapters are those of one device, also after a kill."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise import Quantization
from tests.extensions.quantization.qlora import QLoRA, difference, qllama, stored
from tests.extensions.quantization.runs import KILLED_AFTER, fit
from tests.support.programs import Program

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated",
    "ignore:Ranks from 1 on begin with",
    "ignore:The run began with",
    "ignore:The checkpoint holds states of callbacks",
    r"ignore:FSDP2-wrapped module \(FSDPQLoRA\) returned a view",
)

QUICK = ["dp"]
SLOW = ["ddp", "fsdp", "pipeline", "pipeline, processes"]
EACH = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
PROGRAM = "from tests.extensions.quantization.runs import be_killed\nbe_killed()"


@cache
def on_one_device(build: Any, kind: Any, epochs: int = 1) -> QLoRA:
    return fit(build(), "single_device", [Quantization(kind)], max_epochs=epochs)


def check_equal(module: QLoRA, expected: QLoRA, largest: float) -> None:
    """Check that adapters are equal, and base weights to the bit."""
    assert difference(module, expected) <= largest
    base = stored(expected)
    assert stored(module).keys() == base.keys()
    assert all(torch.equal(value, base[name]) for name, value in stored(module).items())


@pytest.mark.parametrize("strategy", EACH)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_adapters_are_those_of_one_device(strategy: str, kind: Any) -> None:
    module = fit(QLoRA(), strategy, [Quantization(kind)])
    check_equal(module, on_one_device(QLoRA, kind), 1e-12)
    assert difference(module, QLoRA()) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*QUICK, *SLOW])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_llama(strategy: str, kind: Any) -> None:
    module = fit(qllama(), strategy, [Quantization(kind)])
    # It normalises in float32.
    check_equal(module, on_one_device(qllama, kind), 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("strategy", ["single_device", "fsdp, sharded", *QUICK, *SLOW])
def test_a_killed_run_ends_as_if_undisturbed(strategy: str, kind: Any, tmp_path: Path) -> None:
    with Program(PROGRAM, strategy, kind, str(tmp_path), starts_workers=True) as program:
        _, complaint = program.finish()
        # Processes of a strategy are a group of their own, whose loss ends the program.
        assert program.returncode == -9 or "SIGKILL" in complaint, complaint
    assert not (tmp_path / f"step={KILLED_AFTER + 1}.ckpt").exists()
    path = tmp_path / f"step={KILLED_AFTER}.ckpt"
    resumed = fit(QLoRA(), strategy, [Quantization(kind)], path, max_epochs=3)
    undisturbed = fit(QLoRA(), strategy, [Quantization(kind)], max_epochs=3)
    check_equal(resumed, undisturbed, 0)
    # Another strategy continues the run, with the second epoch.
    alone = fit(QLoRA(), "single_device", [Quantization(kind)], tmp_path / "step=3.ckpt", max_epochs=3)
    check_equal(alone, on_one_device(QLoRA, kind, 3), 1e-12)
