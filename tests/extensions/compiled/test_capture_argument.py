"""Captured steps need a CUDA device, and are not compiled at the same time."""

from typing import Any

import pytest

from equipoise import ConfigurationError, Trainer
from equipoise.extensions.compiled import compiled_step
from tests.extensions.compiled.test_compiled_step import fit
from tests.support.step_networks import ByHand, Network, batches


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"capture=True replays .* this run computes on cpu"):
        fit(Network(), capture=True)


def test_strategies_that_compute_in_parts_are_refused() -> None:
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_epochs": 1}
    trainer = Trainer(strategy="dp", devices=["cpu", "cpu"], capture=True, **options)
    with pytest.raises(ConfigurationError, match="capture=True works on one device, but strategy='dp'"):
        trainer.fit(Network(), batches([4]))


def test_manual_optimisation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # The device would be refused before.
    monkeypatch.setattr(compiled_step, "check_strategy", lambda *args, **kwargs: None)
    with pytest.raises(ConfigurationError, match=r"Trainer\(capture=True\) has no effect"):
        fit(ByHand(), capture=True)


@pytest.mark.parametrize("compiled", [True, "auto"])
def test_it_excludes_compile(compiled: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"compile={compiled!r} and capture=True are two ways"):
        Trainer(compile=compiled, capture=True)


@pytest.mark.parametrize("value", ["auto", 1, None])
def test_the_argument_is_a_flag(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="capture must be True or False"):
        Trainer(capture=value)


def test_it_can_be_read() -> None:
    assert Trainer(capture=True, logger=False).captures_steps
    assert not Trainer(logger=False).captures_steps
