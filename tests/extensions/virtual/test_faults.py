"""Steps without parts, skipped parts, buffers, sparse gradients, texts: the same on any number of devices."""

import random
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from equipoise import Efficiency, RunSummary, Trainer, VirtualDevicesStrategy
from equipoise.errors import ConfigurationError, StepError
from equipoise.extensions.virtual.parts.gradient_tree import added, take_gradients
from tests.extensions.virtual.test_strategy import SAMPLES, Augmented, Noisy, Plain, SaveAfter, assert_equal, run
from tests.support.trainer_runs import refuses

pytestmark = pytest.mark.filterwarnings("ignore:The val loader shuffles", "ignore:Lazy modules")


def quiet_trainer(**options: Any) -> Trainer:
    """A trainer of one epoch on one device, without validation."""
    strategy = VirtualDevicesStrategy(count=options.pop("count", 8))
    off = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "limit_val_batches": 0}
    return Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, **off, **{"devices": 1, **options})


@pytest.mark.slow
def test_no_part_in_the_first_step() -> None:
    """The epoch has one step of three samples, so the second process has none."""
    limits = {"limit_train_batches": 1, "batch_size": 3}
    assert_equal(run(Plain, 2, **limits), run(Plain, 1, **limits))


class FirstPartSkipped(Plain):
    """The first part of the run has no loss; loss weights are far from 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        first = self.trainer.global_step == 0 and not self.parts_seen
        self.parts_seen.append(None)
        return None if first and self.trainer.global_rank == 0 else {"loss": loss, "loss_weight": 3 * len(batch[0])}

    def __init__(self) -> None:
        super().__init__()
        self.parts_seen: list[None] = []


@pytest.mark.slow
def test_a_skipped_part_begins() -> None:
    assert_equal(run(FirstPartSkipped, 2), run(FirstPartSkipped, 1))


class Averaging(Noisy):
    """A buffer that the step replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.average = 0.9 * self.average + batch[0].mean(0)
        loss = super().training_step(batch, batch_idx)
        return loss + (self.average * self.net[0].weight).sum()


@pytest.mark.slow
def test_replaced_buffers() -> None:
    assert_equal(run(Averaging, 3), run(Averaging, 1))


class Stateful(Noisy):
    """Attributes that the step reads and changes: a number, a tensor, one of a layer, and a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.average = torch.zeros(6)
        self.net[0].factor = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        self.average = 0.9 * self.average + batch[0].mean(0)
        self.net[0].factor *= 0.99
        self.last = super().training_step(batch, batch_idx)
        return self.last * self.net[0].factor / self.count + (self.average * self.net[0].weight).sum()

    def on_train_batch_end(self, *args: Any) -> None:
        assert self.count == self.trainer.global_step


@pytest.mark.parametrize(
    "options", [pytest.param({"devices": 2}, marks=pytest.mark.slow), {"one_process": True}], ids=str
)
def test_attributes_are_those_of_the_first_part(options: dict[str, Any]) -> None:
    assert_equal(run(Stateful, **{"devices": 2, **options}), run(Stateful, 1))


class Growing(Noisy):
    """A buffer that gets another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = torch.cat([self.seen, batch[1].flatten()])
        return super().training_step(batch, batch_idx)


class RandomEvaluation(Noisy):
    """Draws numbers in evaluations, too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_loss", torch.rand(()) + random.random() + batch[0].sum())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[1] + torch.rand(())


@pytest.mark.slow
def test_random_evaluations() -> None:
    """Both the step and the data set of an evaluation draw, and so does a shuffled loader."""
    val = {"val": DataLoader(Augmented(), batch_size=10), "num_sanity_val_steps": 1}
    assert_equal(run(RandomEvaluation, 2, **val), run(RandomEvaluation, 1, **val))
    val["val"] = DataLoader(Augmented(), batch_size=10, shuffle=True, num_workers=1)
    assert_equal(run(RandomEvaluation, 3, **val), run(RandomEvaluation, 1, **val))


@pytest.mark.slow
def test_predictions_draw_anew() -> None:
    found = []
    for devices in (1, 2):
        L.seed_everything(1, verbose=False)
        trainer = quiet_trainer(devices=devices)
        loader = DataLoader(TensorDataset(torch.zeros(7, 6), torch.zeros(7, 1)), batch_size=2)
        module = RandomEvaluation()
        found.append([torch.cat(trainer.predict(module, loader) or []) for _ in range(2)])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1])


def test_several_loaders_are_refused() -> None:
    data = TensorDataset(torch.zeros(8, 6), torch.zeros(8, 1))
    loaders = {"one": DataLoader(data, batch_size=4), "other": [DataLoader(data, batch_size=4)]}
    refuses(lambda: quiet_trainer(count=2).fit(Noisy(), loaders), "one training loader, but several")


def test_a_buffer_of_another_shape_is_refused() -> None:
    with pytest.raises(StepError, match="gives a buffer another shape"):
        run(Growing, 1)


def noisy_collate(samples: list[Any]) -> list[Tensor]:
    features, targets = map(torch.stack, zip(*samples, strict=True))
    return [features + torch.randn(()), targets]


def test_numbers_of_the_data_depend_on_the_seed() -> None:
    """One epoch of the same samples in the same order differs by the seed of the run alone."""
    sums = []
    for seed in (1, 2):
        L.seed_everything(seed, verbose=False)
        module = Noisy()
        seen: list[Tensor] = []
        module.on_train_batch_start = lambda batch, batch_idx, seen=seen: seen.append(batch[0].sum())  # type: ignore[method-assign,misc]
        fixed = TensorDataset(torch.zeros(8, 6), torch.zeros(8, 1))
        trainer = quiet_trainer(count=2)
        trainer.fit(module, DataLoader(fixed, batch_size=8, collate_fn=noisy_collate))
        sums.append(seen[0])
    assert sums[0] != sums[1]


def test_another_count_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    run(Noisy, 1, callbacks=[SaveAfter(3, path)])
    refuses(lambda: run(Noisy, 1, count=4, ckpt_path=path), "8 virtual devices", "Take count=8")


class Texts(Dataset[Any]):
    """Samples with a text, which are collated to a list, and all read at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        noise = torch.rand(len(indices), 6)
        return [(row + index, torch.ones(1), "a" * index) for row, index in zip(noise, indices, strict=True)]

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("samples are read together")

    def __len__(self) -> int:
        return SAMPLES


class Reading(Noisy):
    """Uses the texts of its samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, targets, texts = batch
        assert len(texts) == len(features)
        lengths = torch.tensor([[float(len(text))] for text in texts])
        return super().training_step((features, targets + lengths), batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize("data", [Texts(), Subset(Texts(), range(SAMPLES))], ids=["texts", "subset"])
def test_texts(data: Any) -> None:
    assert_equal(run(Reading, 2, data=data), run(Reading, 1, data=data))


class Sparse(Noisy):
    """An embedding with sparse gradients; some parts do not use it, and one weight is laid out otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6, sparse=True)
        self.convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, targets = batch
        if features[0, 0] < 1:
            features = features + self.embedding((features * 4).long().abs() % 9).sum(1)
        images = features[:, None, None, :4].expand(-1, 2, 3, -1)
        targets = targets + self.convolution(images).mean((1, 2, 3))[:, None]
        return super().training_step((features, targets), batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}], ids=["", "window"])
def test_sparse_gradients(options: dict[str, Any]) -> None:
    assert_equal(run(Sparse, 3, **options), run(Sparse, 1, **options))


def test_sums_of_sparse_gradients() -> None:
    """Sparse and dense gradients of a parameter are added in any order."""
    dense = torch.randn(4, 2, dtype=torch.float64)
    sparse = torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), torch.randn(3, 2, dtype=torch.float64), (4, 2))
    parameter = nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))
    parameter.grad = sparse.clone()
    taken = take_gradients([parameter])
    assert parameter.grad is None
    expected = dense + sparse.to_dense()
    for left, right in [([dense.clone()], taken), (taken, [dense.clone()])]:
        (total,) = added(left, right)
        assert total is not None
        assert torch.equal(total, expected)
    (total,) = added(taken, taken)
    assert total is not None
    assert total.is_coalesced()
    assert torch.equal(total.to_dense(), 2 * sparse.to_dense())


def test_gradients_are_laid_out_as_their_parameters() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.arange(6.0).view(3, 2).t()
    (taken,) = take_gradients([parameter])
    assert taken is not None
    assert taken.is_contiguous()
    assert taken[1, 0] == 1


class Failing(Noisy):
    """Fails in the fifth part of a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.parts_seen.append(None)
        if len(self.parts_seen) == 8 + 5:
            raise ArithmeticError("in a part")
        return loss

    def __init__(self) -> None:
        super().__init__()
        self.parts_seen: list[None] = []


def test_an_error_leaves_the_state_before_the_batch() -> None:
    module = Failing()
    kept: list[Any] = []

    class Keep(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            gradients = [None if each.grad is None else each.grad.clone() for each in module.parameters()]
            kept[:] = [gradients, [buffer.clone() for buffer in module.buffers()]]

    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 1))
    trainer = quiet_trainer(accumulate_grad_batches=4, callbacks=[Keep()])
    with pytest.raises(ArithmeticError):
        trainer.fit(module, DataLoader(data, batch_size=16))
    gradients, buffers = kept
    assert any(gradient is not None for gradient in gradients)
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)
    assert all(map(torch.equal, module.buffers(), buffers))


class Shapeless(Noisy):
    """Has a parameter without a shape, on which processes cannot agree."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(1)


@pytest.mark.slow
def test_a_failed_setup_shows_its_cause() -> None:
    with pytest.raises(ConfigurationError, match="has no shape yet") as caught:
        run(Shapeless, 2)
    assert not any("Releasing failed" in note for note in getattr(caught.value, "__notes__", ()))


def test_hooks_receive_the_first_part() -> None:
    """A step that returns a dictionary shows it to hooks, with the loss of the whole step."""

    class Returning(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "size": len(batch[0])}

    seen: list[Any] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(
                (outputs["size"], len(batch[0]), float(outputs["loss"]), float(trainer.callback_metrics["loss"]))
            )

    run(Returning, 1, callbacks=[Look()])
    assert [size for size, *_ in seen] == [3, 3, 3, 3, 3] * 2
    assert all(size == length for size, length, *_ in seen)
    assert all(loss == pytest.approx(logged) for *_, loss, logged in seen)


class Counted(RunSummary):
    """Writes the samples that were counted into a file."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            Path("samples.txt").write_text(f"{self._fit.factor * self._fit.throughput.samples:.0f}")
        super().on_fit_end(trainer, pl_module)


@pytest.mark.parametrize("devices", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_samples_of_all_parts_are_counted(devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(Plain, devices, callbacks=[Counted(table=False)])
    assert (tmp_path / "samples.txt").read_text() == f"{2 * SAMPLES}"


def test_tokens_of_all_parts_are_counted() -> None:
    efficiency = Efficiency(tokens=lambda batch: 10 * len(batch[0]))
    run(Plain, 1, callbacks=[efficiency])
    # Three steps of 24 samples are first steps.
    assert efficiency.usage is not None
    assert efficiency.usage.tokens == 10 * efficiency.usage.samples == 10 * (2 * SAMPLES - 3 * 24)


class Neighbours(Noisy):
    """Adds features of neighbours, of which a sparse buffer holds the matrix, and the processes have other ones."""

    layout = torch.sparse_csr
    entries_of_others = 6

    def setup(self, stage: str) -> None:
        matrix = torch.eye(6) + torch.eye(6).flip(0)
        if self.global_rank:
            matrix = torch.diag(torch.arange(6) < self.entries_of_others).float() + torch.eye(6).flip(0)
            matrix *= 2
        self.register_buffer("graph", matrix.to_sparse(layout=self.layout), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, targets = batch
        return super().training_step(((self.graph @ features.T).T, targets), batch_idx)


class InCoordinates(Neighbours):
    """The same in coordinates."""

    layout = torch.sparse_coo


class OtherEntries(Neighbours):
    """Another number of entries in other processes."""

    entries_of_others = 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", [Neighbours, InCoordinates])
def test_sparse_buffers(kind: type[Noisy]) -> None:
    assert_equal(run(kind, 2), run(kind, 1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_buffers_with_other_entries_are_refused() -> None:
    with pytest.raises(StepError, match="has 11 entries in one process and 12 in the first one"):
        run(OtherEntries, 2)
