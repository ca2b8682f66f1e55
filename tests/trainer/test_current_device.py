"""The current device of the user's code is that of its data, as long as a run lasts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from equipoise.trainer import lifecycle as run_module
from tests.support.trainer_runs import Small, loader, trainer

CURRENT: list[torch.device] = []  # the devices that were made the current one, outermost first


class Noting(Small):
    """Notes the current device wherever code of the user's runs."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.seen: list[tuple[torch.device, ...]] = []

    def setup(self, stage: str) -> None:
        self.seen.append(tuple(CURRENT))

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(tuple(CURRENT))
        if self.fails:
            raise ValueError("planned")

    def teardown(self, stage: str) -> None:
        self.seen.append(tuple(CURRENT))


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note current devices, since a CPU has none."""
    CURRENT.clear()

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        CURRENT.append(device)
        try:
            yield
        finally:
            CURRENT.pop()

    monkeypatch.setattr(run_module, "on_device", on_device)


def test_the_device_is_current_from_setup_to_teardown() -> None:
    module = Noting()
    trainer(max_steps=1).fit(module, loader())
    assert module.seen == [(torch.device("cpu"),)] * 3
    assert CURRENT == []


def test_the_device_is_given_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="planned"):
        trainer(max_steps=1).fit(Noting(fails=True), loader())
    assert CURRENT == []
