"""Every precision through the Trainer: automatic and manual, scaled, saved and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.equality import assert_equal
from tests.support.networks.normalised import Classifier, make_batches
from tests.support.trainer_runs import trainer


class Net(Classifier):
    """Notes the dtypes of its input and output; its weights are the same in each."""

    def __init__(self, automatic: bool = True) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.automatic_optimization = automatic
        self.dtypes: set[torch.dtype] = set()

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        self.dtypes |= {images.dtype, logits.dtype}
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def fit(module: Net, data: list[Any], ckpt_path: Path | None = None, **options: Any) -> Any:
    run = trainer(**options)
    run.fit(module, DataLoader(data, batch_size=None), ckpt_path=ckpt_path)
    return run


def by_hand(module: Net, data: list[Any]) -> torch.amp.GradScaler:
    """float16 autocast and a scaler, as torch's documentation writes them."""
    optimizer, scaler = module.configure_optimizers(), torch.amp.GradScaler("cpu")
    for batch in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            loss = module.training_step(batch, 0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.parametrize("automatic", [True, False])
def test_16_mixed_on_the_cpu_equals_a_loop_by_hand_in_float16(automatic: bool) -> None:
    """16-mixed on the CPU is real float16 with a real scaler, to the bit what one writes by hand."""
    module, expected = Net(automatic), Net()
    run = fit(module, make_batches(), precision="16-mixed", max_epochs=2)
    scaler = by_hand(expected, make_batches() * 2)
    assert_equal(expected, module)
    assert run.scaler.state_dict() == scaler.state_dict()
    assert torch.float16 in module.dtypes
    assert run.global_step == 6


@pytest.mark.filterwarnings("ignore:The loss is nan")
def test_an_overflow_is_skipped_and_its_scale_is_resumed(tmp_path: Path) -> None:
    """Gradients that are not finite change nothing, halve the scale, and the run continues, as does a resumed one."""
    module, expected, resumed = Net(), Net(), Net()
    data = make_batches()
    data[1] = (data[1][0] * 1e6, data[1][1])
    run = fit(module, data, precision="16-mixed")
    by_hand(expected, data)
    assert run.scaler.get_scale() == 2.0**15
    assert_equal(dict(expected.named_parameters()), dict(module.named_parameters()))
    assert torch.isfinite(module.features[0].weight).all()
    run.save_checkpoint(tmp_path / "one.ckpt")
    again = fit(resumed, data, tmp_path / "one.ckpt", max_epochs=2, precision="16-mixed")
    assert again.scaler.get_scale() == 2.0**14


@pytest.mark.parametrize(
    ("precision", "weights", "norm", "features"),
    [
        ("bf16-mixed", torch.float32, torch.float32, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("16-true-norm32", torch.float16, torch.float32, torch.float16),
        ("64-true", torch.float64, torch.float64, torch.float64),
    ],
)
def test_dtypes_of_weights_norms_and_input(
    precision: str, weights: torch.dtype, norm: torch.dtype, features: torch.dtype
) -> None:
    """Floating-point values are converted, others are not; training, validation and prediction run in it."""
    module = Net()
    run = fit(module, make_batches(), precision=precision)
    assert (module.features[0].weight.dtype, module.features[1].weight.dtype) == (weights, norm)
    assert module.features[1].running_mean.dtype is norm
    assert features in module.dtypes
    assert not torch.equal(module.features[0].weight.float(), Net().features[0].weight)
    assert run.precision == precision
    (prediction,) = run.predict(module, DataLoader(make_batches(1), batch_size=None))
    assert prediction.isfinite().all()
