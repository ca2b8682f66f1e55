"""A callback puts functions of its own in the place of those that the loop calls."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor

from equipoise import Callback
from tests.support.trainer_runs import Validated, loader, trainer


class Counting(Callback):
    """Counts the calls by their names."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def wrap_call(self, trainer: Any, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[action] += 1
            return function(*args, **kwargs)

        return counted


def weights(*callbacks: Any, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    module = Validated()
    trainer(callbacks=list(callbacks), max_epochs=2, **options).fit(module, loader(4, shuffle=True), loader(2))
    return [parameter.detach() for parameter in module.parameters()]


def test_calls_of_the_loop() -> None:
    counting, second = Counting(), Counting()
    expected = weights()
    assert all(map(torch.equal, weights(counting, second), expected))
    calls = counting.calls
    assert calls == second.calls
    strategy = "[Strategy]SingleDeviceStrategy"
    steps = (
        "run_training_batch",
        *(f"{strategy}.{name}" for name in ("forward_backward", "training_step", "backward")),
    )
    assert [calls[name] for name in steps] == [8, 8, 8, 8]
    assert calls["validation"] == 2
    assert calls[f"{strategy}.validation_step"] >= 4
    # A reading that finds no batch is one, too.
    assert 8 <= calls["[_TrainingEpochLoop].train_dataloader_next"] <= 10


def test_hooks_of_callbacks() -> None:
    class Hooked(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None: ...

    counting = Counting()
    weights(Hooked(), counting)
    (name,) = (name for name in counting.calls if name.endswith("Hooked.on_train_batch_end"))
    assert name.startswith("[Callback]")
    assert counting.calls[name] == 8


def test_beside_a_profiler() -> None:
    counting = Counting()
    profiler = SimpleProfiler()
    weights(counting, profiler=profiler)
    assert counting.calls["run_training_batch"] == len(profiler.recorded_durations["run_training_batch"]) == 8
    reading = "[_TrainingEpochLoop].train_dataloader_next"
    assert counting.calls[reading] == 8


def test_an_object_that_looks_like_a_callback_is_not_asked() -> None:
    mock = MagicMock()
    mock.state_dict.return_value = {}
    mock.state_key = "mock"
    assert all(map(torch.equal, weights(mock), weights()))
    assert not mock.wrap_call.called
