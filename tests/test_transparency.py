"""The first promise: however a batch is split, the gradients are those of one device on the whole batch.

Every strategy runs the same modules, in float64, as one device does; gradients before each step and weights after the
last must agree within 1e-12 of their own size.
"""

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import BalancedDataParallelStrategy, DataParallelStrategy, Strategy, Trainer
from tests.conftest import ignoring

pytestmark = ignoring()

TOLERANCE = 1e-12
FEATURES, CLASSES, TOKENS, VOCABULARY = 6, 4, 5, 11
CHUNKS = [[6, 5], [2, 5, 4], [0, 6, 5], [1, 4, 3, 3]]
SIZES = [11, 11, 7, 11, 3]  # of the batches; accumulated in twos, the last window is ragged


# Modules


class Base(L.LightningModule):
    """Trains on features of shape (batch, TOKENS, FEATURES) and one class for each sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch["features"]), batch["label"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Mlp(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(TOKENS * FEATURES, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, CLASSES)
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)


class Convolution(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1, bias=False),
            nn.GroupNorm(3, 3),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(12, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.net(features.unsqueeze(1)))


class Recurrent(Base):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.lstm(features)[0].mean(1))


class Tied(Base):
    """Predicts every token from the one before, with the embedding as output weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.mix = nn.Linear(6, 6)
        self.output = nn.Linear(6, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.mix(self.embedding(tokens))))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch["tokens"][:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


class Frozen(Base):
    """A layer that is frozen, one that is never used, and one that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused = nn.Linear(FEATURES, 6), nn.Linear(3, 3)
        self.sometimes, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.first.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = torch.tanh(self.first(batch["features"].mean(1)))
        if batch_idx % 2:
            hidden = hidden + self.sometimes(hidden)
        return nn.functional.cross_entropy(self.head(hidden), batch["label"])


class Masked(Tied):
    """The mean over tokens that are not masked, whose number is the weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, mask = self(batch["tokens"][:, :-1]), batch["mask"][:, 1:]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="none")
        weight = mask.sum()
        return {"loss": (losses * mask.flatten()).sum() / weight.clamp(min=1), "loss_weight": self.weight(weight)}

    def weight(self, weight: Tensor) -> Any:
        return weight


class MaskedOnTheHost(Masked):
    """The same with a weight that is a number, so that a part known to be empty is left out."""

    def weight(self, weight: Tensor) -> Any:
        return int(weight)


class Manual(Recurrent):
    """Two optimisers, stepped by hand, the second every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, other = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        one.zero_grad()
        self.manual_backward(loss)
        one.step()
        if batch_idx % 2:
            other.step()
            other.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.lstm.parameters(), lr=0.1), torch.optim.Adam(self.head.parameters(), lr=0.01)


MODULES: list[type[Base]] = [Mlp, Convolution, Recurrent, Tied, Frozen, Masked, MaskedOnTheHost]


# Runs


class Batches(list[Any]):
    """Ready batches; masks are uneven, and whole samples are masked."""

    def __init__(self, sizes: list[int], seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        super().__init__(self._batch(size, draw) for size in sizes)

    @staticmethod
    def _batch(size: int, draw: torch.Generator) -> dict[str, Any]:
        lengths = torch.randint(1, TOKENS + 1, (size, 1), generator=draw)
        return {
            "features": torch.randn(size, TOKENS, FEATURES, generator=draw),
            "label": torch.randint(CLASSES, (size,), generator=draw),
            "tokens": torch.randint(VOCABULARY, (size, TOKENS), generator=draw),
            "mask": torch.arange(TOKENS).expand(size, TOKENS) < lengths,
            "name": "shared by all parts",
            "temperature": torch.tensor(1.0),
        }


class Gradients(L.Callback):
    """Keeps all gradients before every step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor | None]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        named = module.named_parameters()
        self.seen.append({name: None if p.grad is None else p.grad.clone() for name, p in named})


def train(
    make: Callable[[], Base], strategy: Strategy | str, devices: int, sizes: list[int] = SIZES, **options: Any
) -> tuple[Base, list[dict[str, Tensor | None]], Trainer]:
    """Two epochs; returns the module, its gradients before each step, and the trainer."""
    torch.manual_seed(7)
    module, gradients = make(), Gradients()
    trainer = Trainer(
        strategy=strategy,
        devices=["cpu"] * devices,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[gradients],
        **{"precision": "64-true", **options},
    )
    trainer.fit(module, DataLoader(Batches(sizes), batch_size=None))
    return module, gradients.seen, trainer


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the size of the tensor. They may lie on different devices."""
    one, other = one.double().cpu(), other.double().cpu()
    return float((one - other).abs().max() / max(float(one.abs().max()), 1e-3))


def assert_same(reference: tuple[Any, ...], run: tuple[Any, ...], tolerance: float = TOLERANCE) -> None:
    (module, gradients, _), (other, others, _) = reference, run
    assert len(gradients) == len(others) > 0
    for step, (expected, actual) in enumerate(zip(gradients, others, strict=True)):
        for name, gradient in expected.items():
            own = actual[name]
            assert (gradient is None) == (own is None), f"step {step}: {name}"
            if gradient is not None and own is not None:
                assert difference(gradient, own) <= tolerance, f"step {step}: gradient of {name}"
    for (name, expected), actual in zip(module.named_parameters(), other.parameters(), strict=True):
        assert difference(expected.detach(), actual.detach()) <= tolerance, name


REFERENCES: dict[str, Any] = {}


def reference(make: type[Base], **options: Any) -> Any:
    """The run on one device, made once."""
    key = f"{make.__name__} {options}"
    if key not in REFERENCES:
        REFERENCES[key] = train(make, "single_device", 1, **options)
    return REFERENCES[key]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated and clipped by value": {
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
}


# Data parallel and the balanced split


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize(
    ("make", "parallelize"),
    # The step of Frozen calls no forward.
    [(make, how) for make in MODULES for how in ("step", "forward") if not (make is Frozen and how == "forward")],
)
def test_balanced(make: type[Base], parallelize: Any, chunks: list[int]) -> None:
    strategy = BalancedDataParallelStrategy(shares=chunks, parallelize=parallelize)
    assert_same(reference(make), train(make, strategy, len(chunks)))


@pytest.mark.parametrize("options", [name for name in OPTIONS if OPTIONS[name]])
@pytest.mark.parametrize("make", [Mlp, Masked, MaskedOnTheHost], ids=lambda make: make.__name__)
def test_with_options(make: type[Base], options: str) -> None:
    strategy = BalancedDataParallelStrategy(shares=[2, 5, 4])
    assert_same(reference(make, **OPTIONS[options]), train(make, strategy, 3, **OPTIONS[options]))


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 13])
def test_data_parallel(devices: int) -> None:
    assert_same(reference(Recurrent), train(Recurrent, "dp", devices))


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_manual_optimization(chunks: list[int]) -> None:
    strategy = BalancedDataParallelStrategy(shares=chunks, parallelize="forward")
    assert_same(reference(Manual), train(Manual, strategy, len(chunks)))


@pytest.mark.parametrize("parallelize", ["step", "forward"])
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-4), ("bf16-mixed", 0.1)])
def test_lower_precisions(precision: str, tolerance: float, parallelize: Any) -> None:
    """As far as they go. Plain SGD: Adam would make differences of rounding as large as a gradient."""

    class Plain(Mlp):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    strategy = BalancedDataParallelStrategy(shares=[2, 5, 4], parallelize=parallelize)
    one = train(Plain, "single_device", 1, precision=precision)
    assert_same(one, train(Plain, strategy, 3, precision=precision), tolerance)


def test_a_whole_batch_that_is_masked() -> None:
    """Nothing is divided by zero; the other batches of the window make the step."""

    class Emptied(MaskedOnTheHost):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                batch = {**batch, "mask": torch.zeros_like(batch["mask"])}
            return super().training_step(batch, batch_idx)

    class EmptiedOnTheDevice(Emptied):
        def weight(self, weight: Tensor) -> Any:
            return weight

    for make in (Emptied, EmptiedOnTheDevice):
        one = train(make, "single_device", 1, accumulate_grad_batches=2)
        assert all(torch.isfinite(p).all() for p in one[0].parameters())
        assert_same(one, train(make, DataParallelStrategy(), 3, accumulate_grad_batches=2))


@settings(max_examples=15)
@given(st.data())
def test_any_shares_of_any_batches(data: st.DataObject) -> None:
    devices = data.draw(st.integers(2, 5), label="devices")
    share = st.one_of(st.integers(0, 9), st.floats(0.01, 9))
    shares = data.draw(st.lists(share, min_size=devices, max_size=devices).filter(any), label="shares")
    sizes = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=4), label="sizes of batches")
    window = data.draw(st.integers(1, 3), label="window")
    make = data.draw(st.sampled_from([Mlp, Recurrent, Masked]), label="module")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = train(make, "single_device", 1, sizes, accumulate_grad_batches=window)
        strategy = BalancedDataParallelStrategy(shares=shares)
        assert_same(one, train(make, strategy, devices, sizes, accumulate_grad_batches=window))


def test_shares_changed_in_mid_run() -> None:
    class Change(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            strategy.shares = [[0, 1, 2], [5, 1, 1], [1, 1, 0]][batch_idx % 3]

    strategy = BalancedDataParallelStrategy(shares=[1, 1, 1])
    torch.manual_seed(7)
    module = Recurrent()
    trainer = Trainer(
        strategy=strategy,
        devices=["cpu"] * 3,
        max_epochs=2,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Change()],
    )
    trainer.fit(module, DataLoader(Batches(SIZES), batch_size=None))
    for expected, actual in zip(reference(Recurrent)[0].parameters(), module.parameters(), strict=True):
        assert difference(expected.detach(), actual.detach()) <= TOLERANCE
