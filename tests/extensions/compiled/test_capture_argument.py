"""Captured steps need a CUDA device, and are not compiled at the same time."""

from typing import Any

import pytest

from equipoise.extensions.compiled import compiled_step
from tests.support.step_networks import ByHand, Network, batches
from tests.support.trainer_runs import refuses, trainer


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["capture=True replays ", "this run computes on cpu"]),
        ({"strategy": "dp", "devices": ["cpu", "cpu"]}, ["capture=True works on one device, but strategy='dp'"]),
        ({"compile": True}, ["compile=True and capture=True are two ways"]),
        ({"compile": "auto"}, ["compile='auto' and capture=True are two ways"]),
        ({"capture": "auto"}, ["capture must be True or False"]),
        ({"capture": 1}, ["capture must be True or False"]),
        ({"capture": None}, ["capture must be True or False"]),
    ],
)
def test_captures_on_a_cpu_of_parts_and_of_compiled_steps_are_refused(options: Any, words: list[str]) -> None:
    refuses(lambda: trainer(**{"capture": True, "devices": 1, **options}).fit(Network(), batches([4])), *words)


def test_manual_optimisation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # The device would be refused before.
    monkeypatch.setattr(compiled_step, "check_strategy", lambda *args, **kwargs: None)
    words = "Trainer(capture=True) has no effect"
    refuses(lambda: trainer(capture=True, devices=1).fit(ByHand(), batches([4])), words)
