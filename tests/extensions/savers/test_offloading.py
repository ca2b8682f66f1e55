"""Saved tensors on the host: the same numbers, nothing copied twice or needlessly, and less memory on a device."""

from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from equipoise import Callback, DDPStrategy, FSDPStrategy, MemoryLogger, PipelineStrategy, Trainer
from equipoise.extensions.savers import offloading as offloading_module
from equipoise.extensions.savers.offloading import Offloading
from tests.support.equality import assert_equal
from tests.support.trainer_runs import refuses, trainer

CPU = torch.device("cpu")
ON_DEVICES = pytest.mark.skipif(not torch.cuda.is_available(), reason="a host has no memory beside its own")


class Network(nn.Module):
    """Convolutions, normalisation, dropout, an expanded tensor, a reused activation and views."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.first(images)).relu()
        hidden = hidden + self.second(hidden) * hidden
        hidden = checkpoint(self.drop, hidden, use_reentrant=False)
        pooled = hidden.transpose(1, 3).exp().mean((1, 2))
        scale = pooled.new_ones(1, requires_grad=True).expand_as(pooled)
        return self.head(pooled * scale).softmax(-1)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the tensors that are copied to the host."""
    copied: list[Tensor] = []

    class Noting(offloading_module._Copy):
        def __init__(self, tensor: Tensor, storage: Any) -> None:
            copied.append(tensor)
            super().__init__(tensor, storage)

    monkeypatch.setattr(offloading_module, "_Copy", Noting)
    return copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("least_bytes", [0, 2000])
def test_offloading_outside_of_a_trainer_copies_and_gives_the_same_gradients(
    copied: list[Tensor], dtype: torch.dtype, least_bytes: int
) -> None:
    network = Network().to(dtype)
    images = torch.rand(4, 3, 6, 6, dtype=dtype).to(memory_format=torch.channels_last)
    outcomes = []
    for forward in (nullcontext, Offloading(network, CPU, least_bytes=least_bytes).forward):
        torch.manual_seed(5)
        with forward():
            loss = network(images).square().sum()
        outcomes.append([loss.detach(), *torch.autograd.grad(loss, list(network.parameters()))])
    assert_equal(*outcomes)
    assert copied


def test_parameters_buffers_views_and_small_tensors_are_not_copied(copied: list[Tensor]) -> None:
    """Nor are expanded ones; what is saved twice is copied once."""
    layer = nn.Linear(16, 16)
    layer.register_buffer("scale", torch.ones(16, 16))
    offloading = Offloading(layer, CPU, least_bytes=256)
    inputs = torch.rand(16, 16, requires_grad=True)
    small = torch.rand(2, requires_grad=True)
    with offloading.forward():
        hidden = layer(inputs)
        hidden = (hidden * layer.scale * layer.weight.t()).exp()
        loss = (hidden * hidden).sum() + small.exp().sum() + inputs.sum(0).expand(16, 16).sin().sum()
    shapes = [tuple(tensor.shape) for tensor in copied]
    # The input of the layer, the product before the weight's, and the result of exp, which the square saves, too.
    assert shapes == [(16, 16)] * 3
    loss.backward()


def test_a_changed_tensor_is_copied_again(copied: list[Tensor]) -> None:
    start = torch.rand(8, 8, dtype=torch.float64, requires_grad=True)

    def compute() -> Tensor:
        hidden = start * 1.5
        first = hidden.sin()
        hidden.mul_(2)
        return (first + hidden.sin()).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        compute().backward()
    with Offloading(nn.Module(), CPU, least_bytes=1).forward():
        loss = compute()
    (gradient,) = torch.autograd.grad(loss, start)
    torch.testing.assert_close(gradient, 1.5 * (1.5 * start).cos() + 3 * (3 * start).cos(), rtol=1e-14, atol=1e-14)
    assert len(copied) == 2


@pytest.mark.parametrize("operation", ["sin", "exp"], ids=["saved input", "saved output"])
def test_a_tensor_that_stays_on_the_device_must_not_change(operation: str) -> None:
    hidden = torch.ones(3, requires_grad=True) * 2
    with Offloading(nn.Module(), CPU, least_bytes=1000).forward():
        result = getattr(hidden, operation)()
    changed = hidden if operation == "sin" else result
    with torch.no_grad():
        changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_nothing_is_held_after_the_backward() -> None:
    network = Network()
    offloading = Offloading(network, CPU, least_bytes=1)
    with offloading.forward():
        loss = network(torch.rand(2, 3, 4, 4)).sum()
    loss.backward()
    del loss
    assert not list(offloading._copies)


# In the Trainer.


class Module(L.LightningModule):
    """A deep network whose activations are larger than its weights; it may optimise by hand."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Sigmoid()) for _ in range(8)))
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.layers(batch).square().mean()
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(module: Module, **options: Any) -> Module:
    run = trainer(**{"accelerator": "auto", "devices": 1, **options})
    data = torch.rand(1024, 32, generator=torch.Generator().manual_seed(1))
    run.fit(module, DataLoader(data, 512))  # type: ignore[arg-type]
    return module


@ON_DEVICES
@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}, {"step_in_backward": True}, {"by_hand": True}],
    ids=str,
)
def test_weights_are_equal_on_a_device(options: dict[str, Any]) -> None:
    options = dict(options)
    by_hand = options.pop("by_hand", False)
    usual = fit(Module(by_hand=by_hand), **options)
    assert_equal(usual, fit(Module(by_hand=by_hand), offload_activations=0, **options))


class CountsCopies(Callback):
    """Counts the tensors that are copied to the host in this process, and fails if there are none."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.count = 0
        kind = offloading_module._Copy

        def counted(*arguments: Any) -> Any:
            self.count += 1
            return kind(*arguments)

        offloading_module._Copy = counted
        self.restore = lambda: setattr(offloading_module, "_Copy", kind)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.restore()
        del self.restore
        assert self.count > 0


@ON_DEVICES
def test_weights_are_equal_under_ddp() -> None:
    """Each process offloads what its own forward saves."""
    options: dict[str, Any] = {"strategy": DDPStrategy(backend="gloo"), "devices": 2}
    usual = fit(Module(), **options)
    assert_equal(usual, fit(Module(), offload_activations=0, callbacks=[CountsCopies()], **options))


@ON_DEVICES
def test_offload_activations_saves_memory_of_the_device() -> None:
    """Of 17 activations of 64 KiB, a few remain at the peak of the device."""
    peaks = {}
    for choice in (False, 1024):
        memory = MemoryLogger(detail="modules", leaks=False)
        fit(Module(), offload_activations=choice, callbacks=[memory])
        peaks[choice] = {peak.device: peak.nbytes for peak in memory.compositions}["cuda:0"]
    saved_tensors = 8 * 512 * 32 * 4
    assert peaks[False] - peaks[1024] > 0.6 * saved_tensors


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a CPU alone")
def test_offloading_has_no_effect_on_a_cpu() -> None:
    with pytest.warns(UserWarning, match="offload_activations has no effect on a CPU"):
        fit(Module(), offload_activations=True)


ON_HOST: dict[str, Any] = {"accelerator": "cpu", "devices": 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"strategy": name, **ON_HOST}, [name]) for name in ("dp", "balanced", "pipeline")),
        # Simulated devices have no NCCL.
        ({"strategy": FSDPStrategy(backend="gloo"), **ON_HOST}, ["fsdp"]),
        # Each process has one device.
        ({"strategy": PipelineStrategy(engine="processes"), **ON_HOST}, ["strategy='pipeline'", "parts"]),
        ({"compile": True}, ["compile"]),
    ],
)
def test_strategies_and_compiled_steps_are_refused(options: dict[str, Any], words: list[str]) -> None:
    refuses(lambda: fit(Module(), offload_activations=True, **options), *words)


@pytest.mark.parametrize("choice", ["yes", -1, 1.5, None])
def test_the_argument_is_a_flag_or_a_number_of_bytes(choice: Any) -> None:
    words = "offload_activations must be True, False or a number of bytes"
    refuses(lambda: Trainer(offload_activations=choice), words)
