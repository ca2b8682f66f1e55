"""Features of torch that users of GPUs take, in the trainer: optimisers, streams, memory formats, compiled steps."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from equipoise import PipelineStrategy
from tests.gpu.runs import CPU, Classifier, fit
from tests.support.networks.transparency import Mlp
from tests.support.one_device import assert_same_run

pytestmark = pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")

TOLERANCE = 1e-10

# Optimisers

RATE = torch.tensor(0.01, dtype=torch.float64)
FUSED = {"fused": True}


@pytest.mark.parametrize(
    ("kind", "of_optimizer", "options"),
    [
        (torch.optim.SGD, FUSED, {}),
        (torch.optim.Adam, FUSED, {"gradient_clip_val": 0.05}),
        (torch.optim.AdamW, FUSED, {"accumulate_grad_batches": 2}),
        (torch.optim.AdamW, FUSED | {"lr": RATE}, {}),
        # They compute with the number of steps in float32.
        (torch.optim.AdamW, {"capturable": True, "lr": RATE}, {}),
        *((kind, {"capturable": True}, {}) for kind in (torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop)),
    ],
)
def test_fused_and_capturable_optimizers(kind: Any, of_optimizer: dict[str, Any], options: dict[str, Any]) -> None:
    expected = fit(lambda: Classifier(partial(kind, lr=0.01)), CPU, **options)
    actual = fit(lambda: Classifier(partial(kind, **{"lr": 0.01, **of_optimizer})), **options)
    assert_same_run(expected, actual, 1e-4 if "capturable" in of_optimizer else TOLERANCE)


def test_optimizers_that_the_trainer_fuses() -> None:
    options: Any = {"gradient_clip_val": 0.05}
    assert_same_run(fit(Classifier, CPU, **options), fit(Classifier, fused_optimizer=True, **options), TOLERANCE)


# Streams


class Streams(Callback):
    """Notes in which stream each step runs."""

    def __init__(self) -> None:
        self.seen: set[torch.cuda.Stream] = set()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.add(torch.cuda.current_stream())


@pytest.mark.parametrize(
    ("strategy", "parts", "options"),
    [
        ("single_device", 1, {}),
        ("single_device", 1, {"capture": True}),
        ("dp", 2, {}),
        ("balanced", 2, {}),
        (PipelineStrategy(micro_batches=2), 2, {}),
    ],
    ids=["single_device", "captured", "dp", "balanced", "pipeline"],
)
def test_a_run_within_a_stream(strategy: Any, parts: int, options: dict[str, Any]) -> None:
    """Everything runs in the stream of the caller, which nothing else is ordered with."""
    expected = fit(Mlp, CPU)
    streams = Streams()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        actual = fit(Mlp, strategy=strategy, parts=parts, callbacks=[streams], **options)
    stream.synchronize()
    assert streams.seen == {stream}
    assert_same_run(expected, actual, TOLERANCE)


# Memory formats


class ChannelsLast(Classifier):
    """A convolution whose channels come last in memory."""

    def __init__(self, memory_format: torch.memory_format = torch.channels_last) -> None:
        super().__init__()
        self.memory_format = memory_format
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        )
        self.to(memory_format=memory_format)

    def forward(self, features: Tensor) -> Tensor:
        images = features.unsqueeze(1).expand(-1, 3, -1, -1).contiguous(memory_format=self.memory_format)
        return self.net(images)


@pytest.mark.parametrize(("strategy", "parts"), [("single_device", 1), ("dp", 1), ("pipeline", 1)])
def test_channels_last(strategy: str, parts: int) -> None:
    expected = fit(lambda: ChannelsLast(torch.contiguous_format), CPU)
    actual = fit(ChannelsLast, strategy=strategy, parts=parts)
    assert_same_run(expected, actual, TOLERANCE)
    module = actual[0]
    assert module.net[0].weight.is_contiguous(memory_format=torch.channels_last)


# Compiled steps


@pytest.mark.slow
@pytest.mark.not_simulated("no kernels that a compiler could make")
@pytest.mark.parametrize("part", ["network", "step", "trainer"])
def test_compiled(part: str) -> None:
    """A warning, which is an error here, would say that a step stays eager."""

    def compiled() -> Mlp:
        module = Mlp()
        if part == "network":
            module.net.compile()
        if part == "step":
            module.training_step = torch.compile(module.training_step)  # type: ignore[method-assign]
        return module

    expected = fit(Mlp, CPU, sizes=[8] * 4)
    assert_same_run(expected, fit(compiled, sizes=[8] * 4, compile=part == "trainer"), 1e-8)
