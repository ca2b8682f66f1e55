"""Every precision through the Trainer: automatic and manual, scaled, saved and resumed."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.support.trainer_runs import trainer


class Net(L.LightningModule):
    """A small network with a normalisation layer."""

    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.automatic_optimization = automatic
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        features, labels = batch
        logits = self.net(features)
        self.dtypes |= {features.dtype, logits.dtype}
        loss = nn.functional.cross_entropy(logits.float(), labels)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def batches(count: int = 4, scale: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """Batches of eight."""
    generator = torch.Generator().manual_seed(1)
    return [
        (scale * torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]


class Loader:
    """Gives batches as they are."""

    def __init__(self, given: list[Any]) -> None:
        self.given = given

    def __len__(self) -> int:
        return len(self.given)

    def __iter__(self) -> Any:
        return iter(self.given)


def by_hand(module: Net, data: list[Any], epochs: int = 1) -> torch.amp.GradScaler:
    """float16 autocast and a scaler, as torch's documentation writes them."""
    optimizer, scaler = module.configure_optimizers(), torch.amp.GradScaler("cpu")
    for features, labels in data * epochs:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            loss = nn.functional.cross_entropy(module.net(features).float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


def pair(automatic: bool = True) -> tuple[Net, Net]:
    """Two modules with the same weights."""
    torch.manual_seed(0)
    first, second = Net(automatic), Net()
    second.load_state_dict(first.state_dict())
    return first, second


@pytest.mark.parametrize("automatic", [True, False])
def test_scaled_float16(automatic: bool) -> None:
    """16-mixed on the CPU is real float16 with a real scaler, to the bit what one writes by hand."""
    module, expected = pair(automatic)
    run = trainer(max_epochs=2, precision="16-mixed")
    run.fit(module, Loader(batches()))
    scaler = by_hand(expected, batches(), epochs=2)
    for name, value in expected.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name
    assert run.scaler is not None
    assert run.scaler.state_dict() == scaler.state_dict()
    assert torch.float16 in module.dtypes
    assert run.global_step == 8


@pytest.mark.filterwarnings("ignore:The loss is nan")
def test_an_overflow_is_skipped() -> None:
    """Gradients that are not finite change nothing, halve the scale, and the run continues."""
    module, expected = pair()
    data = batches(3)
    data[1] = (data[1][0] * 1e6, data[1][1])
    run = trainer(precision="16-mixed")
    run.fit(module, Loader(data))
    by_hand(expected, data)
    assert run.scaler is not None
    assert run.scaler.get_scale() == 2.0**15
    assert torch.equal(module.net[0].weight, expected.net[0].weight)
    assert torch.isfinite(module.net[0].weight).all()


@pytest.mark.filterwarnings("ignore:The loss is nan")
def test_the_scaler_is_resumed(tmp_path: Path) -> None:
    """A resumed run has the scale of one that continued."""
    module, resumed = pair()
    data = batches(2)
    data[1] = (data[1][0] * 1e6, data[1][1])
    run = trainer(precision="16-mixed")
    run.fit(module, Loader(data))
    run.save_checkpoint(tmp_path / "one.ckpt")
    again = trainer(max_epochs=2, precision="16-mixed")
    again.fit(resumed, Loader(data), ckpt_path=tmp_path / "one.ckpt")
    assert again.scaler is not None
    assert again.scaler.get_scale() == 2.0**14


@pytest.mark.parametrize(
    ("precision", "weights", "norm", "features"),
    [
        ("32-true", torch.float32, torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.float32, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("16-true", torch.float16, torch.float16, torch.float16),
        ("16-true-norm32", torch.float16, torch.float32, torch.float16),
        ("64-true", torch.float64, torch.float64, torch.float64),
    ],
)
def test_dtypes(precision: str, weights: torch.dtype, norm: torch.dtype, features: torch.dtype) -> None:
    """Floating-point values are converted, others are not; training, validation and prediction run in it."""
    torch.manual_seed(0)
    module = Net()
    before = module.net[0].weight.detach().clone()
    run = trainer(precision=precision)
    run.fit(module, Loader(batches()))
    assert module.net[0].weight.dtype is weights
    assert module.net[1].weight.dtype is norm
    assert module.net[1].running_mean.dtype is norm
    assert features in module.dtypes
    assert not torch.equal(module.net[0].weight.float(), before)
    assert run.precision == precision
    module.forward = lambda batch: module.net(batch[0])
    predictions = run.predict(module, Loader(batches(1)))
    assert predictions is not None
    assert predictions[0].isfinite().all()


def test_clipping_sees_unscaled_gradients() -> None:
    """The norm after clipping is that of the true gradients."""
    norms: list[float] = []

    class Watching(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters()])))

    torch.manual_seed(0)
    module = Watching()
    run = trainer(precision="16-mixed", gradient_clip_val=1e-3)
    before = module.net[3].weight.detach().clone()
    run.fit(module, Loader(batches(1)))
    assert 0.01 < norms[0] < 100  # a scaled one would be 65536 times as large
    assert (module.net[3].weight - before).abs().max() <= 0.05 * 1e-3
