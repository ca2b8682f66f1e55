"""Parts computed once more: nothing changes in the run, and what differs is named in all processes."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from equipoise import VirtualDevicesStrategy
from equipoise.errors import StepError
from equipoise.extensions.virtual.parts.part_batches import Part
from equipoise.extensions.virtual.parts.part_steps import PartSteps
from equipoise.extensions.virtual.verification.batch_copies import packed_parts, unpacked_parts
from equipoise.extensions.virtual.verification.part_digests import digests_of
from equipoise.extensions.virtual.verification.verified_steps import VerifiedSteps
from tests.conftest import ignoring
from tests.extensions.virtual.test_faults import Averaging, Sparse
from tests.extensions.virtual.test_strategy import Noisy, Plain, Skipping, assert_equal, on_one_device, run
from tests.support.trainer_runs import refuses

pytestmark = ignoring("The val loader shuffles", "Sparse [CB]S")

REASON = "Batches are sent.", "leave it out"


class Counted(Noisy):
    """Metrics in a collection, attributes, a list and a hook of the backward; a batch that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].mul_(0.5)
        loss = super().training_step(batch, batch_idx)
        self.metrics.update(batch[0].sum(1, keepdim=True), batch[1])
        self.log("mse", self.metrics["MeanSquaredError"])
        self.steps += 1
        self.losses.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        self.log("norm", self.net[0].weight.grad.norm(), on_epoch=True)

    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.trainer.world_size == 1:
            assert 8 * self.steps == len(self.losses) == 8 * (self.trainer.fit_loop.total_batch_idx + 1)


@pytest.mark.parametrize("kind", [Counted, Skipping, Averaging, Sparse])
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_changes(kind: type[Noisy], devices: int) -> None:
    verified = run(kind, devices, verify=1, accumulate_grad_batches=3)
    assert_equal(verified, on_one_device(kind, accumulate_grad_batches=3))


class Overlapping(Noisy):
    """A batch that has a tensor twice, and a view of it, is changed in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, again, first, targets = batch
        features.mul_(2)
        return super().training_step((again, first + targets), batch_idx)


def overlapping(samples: list[Any]) -> Any:
    features, targets = default_collate(samples)
    return features, features, features[:, :1], targets


class Freezing(Noisy):
    """Freezes a layer in the second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(False)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "devices", "options"),
    [
        (Overlapping, 1, {"collate_fn": overlapping}),
        pytest.param(Overlapping, 2, {"collate_fn": overlapping}, marks=pytest.mark.slow),
        (Freezing, 1, {}),
        pytest.param(Freezing, 2, {}, marks=pytest.mark.slow),
    ],
)
def test_what_is_not_refused(kind: type[Noisy], devices: int, options: dict[str, Any]) -> None:
    assert_equal(run(kind, devices, verify=1, **options), run(kind, 1, verify=0, **options))


@pytest.mark.slow
def test_a_process_without_parts() -> None:
    """The last step has three samples, of which the second process has none."""
    assert_equal(run(Plain, 2, batch_size=28, verify=2), on_one_device(Plain, batch_size=28))


class Look(L.Callback):
    """Counts backwards, notes states after each batch, and writes the error of each process."""

    backwards = 0
    kind: Any = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states: list[Any] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.backwards += 1

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.kind = type(trainer.strategy._strategy._steps)
        trainer.save_checkpoint(self.folder / "x.ckpt")
        position = torch.load(self.folder / "x.ckpt", weights_only=False)["equipoise"]["position"]
        self.states.append((position["window"], torch.get_rng_state().tolist()))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        Path(self.folder, f"{trainer.global_rank}.txt").write_text(str(exception))


@pytest.mark.parametrize(("verify", "verified"), [(1, 10), (3, 4), (100, 1)])
def test_how_often(tmp_path: Path, verify: int, verified: int) -> None:
    look, without = Look(tmp_path), Look(tmp_path)
    run(Noisy, 1, verify=verify, callbacks=[look], accumulate_grad_batches=3)
    run(Noisy, 1, verify=0, callbacks=[without], accumulate_grad_batches=3)
    assert (look.backwards, without.backwards) == (8 * (10 + verified), 8 * 10)
    assert (look.kind, without.kind) == (VerifiedSteps, PartSteps)
    assert look.states == without.states


class Scaled(torch.autograd.Function):
    """Multiplies in the forward by one number, and in the backward by another."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, scale: float, scale_back: float) -> Tensor:
        ctx.scale_back = scale_back
        return features * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.scale_back, None, None


class Scaling(nn.Module):
    """Multiplies by a number close to 1, which grows with each call, or with the rank."""

    def __init__(self, by_rank: bool, in_backward: bool) -> None:
        super().__init__()
        self.by_rank = by_rank
        self.in_backward = in_backward
        self._calls: list[None] = []

    def forward(self, features: Tensor) -> Tensor:
        self._calls.append(None)
        scale = 1 + 2**-50 * (torch.distributed.get_rank() if self.by_rank else len(self._calls))
        return Scaled.apply(features, *((1.0, scale) if self.in_backward else (scale, 1.0)))


class Planted(Noisy):
    """Four layers, of which one computes otherwise elsewhere."""

    def __init__(self, by_rank: bool, in_backward: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(True), Scaling(by_rank, in_backward), nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("devices", "by_rank", "in_backward"),
    [
        (1, False, False),
        (1, False, True),
        pytest.param(2, False, False, marks=pytest.mark.slow),
        (2, True, False),
        pytest.param(2, True, True, marks=pytest.mark.slow),
    ],
)
def test_what_differs_is_named(tmp_path: Path, devices: int, by_rank: bool, in_backward: bool) -> None:
    kind: Any = partial(Planted, by_rank, in_backward)
    with pytest.raises(StepError) as caught:
        run(kind, devices, verify=3, callbacks=[Look(tmp_path)], num_sanity_val_steps=0, precision="64-true")
    places = "in process 0 and in process 1" if by_rank else "twice in process 0"
    tensor = "gradient of the input" if in_backward else "output"
    message = str(caught.value)
    texts = "Part 0 of batch 0 of epoch 0", f"{places}: ", "the gradient of 'net.0.weight' (by up to "
    texts += f"between modules is the {tensor} of 'net.2', of type Scaling. ", "Trainer(deterministic=True)"
    assert not [text for text in texts if text not in message]
    assert [path.read_text() for path in tmp_path.iterdir()] == [message] * devices


class Late(Noisy):
    """The loss of one part of the second epoch is another when it is computed for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[None] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(None)
        return super().training_step(batch, batch_idx) + (len(self.seen) == 8 * 5 + 6)


class Growing(Late):
    """The factor of the loss grows with each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + len(self.seen))


def test_differences_outside_of_modules() -> None:
    once = r"Part 5 of batch 0 of epoch 1.* the loss \(the same when computed again\)\. Inputs and outputs"
    for kind, expected in [(Late, once), (Growing, r"the gradient of the output of 'net.4', of type Linear\.")]:
        with pytest.raises(StepError, match=expected):
            run(kind, 1, verify=5)


def test_copies_lie_in_memory_as_their_tensors() -> None:
    numbers = torch.arange(40.0)
    tensors = [numbers[3:7], numbers.view(5, 8)[1:, 2:5], numbers[2].expand(3, 4), numbers[5], numbers[:0]]
    tensors += [numbers.view(8, 5).t(), torch.randn(3, dtype=torch.cfloat).conj(), numbers.to_sparse(), numbers > 3]
    parts = unpacked_parts(
        packed_parts({6: Part({"x": [*tensors], "text": "a"}, 3, ("key",))}, *REASON), [torch.device("cpu")]
    )
    batch = parts[6].batch
    assert (batch["text"], *parts[6][1:]) == ("a", 3, ("key",), 0)
    for tensor, copied in zip(tensors, batch["x"], strict=True):
        assert torch.equal(copied.to_dense(), tensor.to_dense())
        if tensor.layout is torch.strided and tensor.numel() and not tensor.is_conj():
            assert copied.stride() == tensor.stride()
            assert copied.data_ptr() % 64 == tensor.data_ptr() % 64


def test_copies_overlap_as_their_tensors() -> None:
    """Also those of other dtypes; a tensor that is there twice is one; those that do not overlap are sent alone."""
    numbers = torch.zeros(100_000)
    pair = torch.zeros(2, dtype=torch.complex128)
    tensors = [
        numbers[17:20],
        numbers[18:23],
        numbers[99_990:],
        pair,
        torch.view_as_real(pair)[1],
        pair.view(torch.uint8),
    ]
    content = packed_parts({0: Part([*tensors, numbers[17:20], tensors[1], tensors[2].to_sparse()], 1)}, *REASON)
    assert len(content) < 4000
    first, second, far, one, real, raw, again, same, _ = unpacked_parts(content, [torch.device("cpu")])[0].batch
    assert same is second
    second[0] = 1
    assert first.tolist() == again.tolist() == [0, 1, 0]
    one[1] = 2 + 3j
    assert real.tolist() == [2, 3]
    assert torch.equal(raw, one.view(torch.uint8))
    assert not far.any()


@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
)
def test_digests_of_sparse_tensors(layout: torch.layout) -> None:
    matrix = torch.tensor([[1.0, 2.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
    others = [matrix, matrix.clone(), matrix.roll(1, 0), matrix.roll(2, 1), matrix + matrix]
    block = (1, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    tensors = {str(index): other.to_sparse(layout=layout, blocksize=block) for index, other in enumerate(others)}
    same, equal, *different = digests_of(tensors).values()
    assert same == equal
    assert len({same, *different}) == 4


def test_what_is_refused() -> None:
    for value in (-1, 0.5, True, None):
        refuses(
            lambda value=value: VirtualDevicesStrategy(verify=value),
            "verify must be an integer of at least 0",
            repr(value),
        )
    with pytest.raises(StepError, match="cannot be pickled"):
        packed_parts({0: Part([torch.ones(2), threading.Lock()], 2)}, *REASON)
