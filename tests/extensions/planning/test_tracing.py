"""Steps that a trace cannot follow as they are: what is guessed, what is refused, and which line is to blame."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import ConfigurationError, Trainer
from equipoise.extensions.planning.description.settings import StepSettings
from equipoise.extensions.planning.peaks.memory_prediction import MemoryPrediction
from equipoise.extensions.planning.tracing.batches import batch_of_size, size_of_batch
from equipoise.extensions.planning.tracing.tracer import measure_step, trace_step
from tests.support.quiet import QUIET

HERE = Path(__file__).name


class Plain(LightningModule):
    """One layer; the loss is that of `step(module, batch)`."""

    def __init__(self, step: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def traced(step: Callable[[Any, Any], Any], example: Any = None, **settings: Any) -> MemoryPrediction:
    if example is None:
        example = torch.rand(4, 6)
    return trace_step(lambda: Plain(step), example, StepSettings(**settings))


def test_a_line_that_reads_a_value_is_named() -> None:
    def step(module: Any, batch: Tensor) -> Tensor:
        loss = module.layer(batch).square().mean()
        module.logger.experiment.add_scalar("loss", loss.item())
        if torch.isnan(loss):
            raise ValueError("not reached")
        return loss

    found = traced(step)
    assert found.method == "traced"
    assert len(found.notes) == 2
    assert all(note.startswith(f"{HERE}:") and "the value of a tensor is read" in note for note in found.notes)


def test_a_logger_of_any_kind_has_a_stand_in() -> None:
    def step(module: Any, batch: Tensor) -> Tensor:
        experiment = module.logger.experiment
        experiment.config.update({"width": 6})
        experiment["loss"].append(1.0)
        experiment["width"] = 6
        # It has no entries, rather than one for each number.
        assert "depth" not in experiment
        assert not list(experiment)
        loss: Tensor = module.layer(batch).square().mean()
        return loss

    found = traced(step)
    assert found.method == "traced"
    assert not found.notes


def test_a_step_reads_what_a_trainer_of_one_device_has() -> None:
    names = ("accumulate_grad_batches", "current_epoch", "global_rank", "is_global_zero", "local_rank", "max_steps")
    names += ("num_devices", "num_nodes", "testing", "training", "validating", "world_size")
    seen: list[Any] = []

    def step(module: Any, batch: Tensor) -> Tensor:
        seen.append([getattr(module.trainer, name) for name in names])
        loss: Tensor = module.layer(batch).square().mean()
        return loss

    traced(step)
    Trainer(accelerator="cpu", devices=1, max_epochs=1, **QUIET).fit(Plain(step), DataLoader(torch.rand(4, 6), 4))
    assert seen[0] == seen[-1]


def test_a_mask_counts_with_all_of_its_entries() -> None:
    def masked(module: Any, batch: Tensor) -> Tensor:
        return module.layer(batch)[batch > 2].square().mean()

    def unmasked(module: Any, batch: Tensor) -> Tensor:
        return module.layer(batch).flatten().square().mean()

    found = traced(masked)
    assert "as large as it can be" in found.notes[0]
    assert found.peak(1000).nbytes >= traced(unmasked).peak(1000).nbytes


def test_a_step_for_one_size_alone_is_refused_for_others() -> None:
    found = traced(lambda module, batch: module.layer(batch).view(4, 6).square().mean())
    assert found.peak().nbytes > 0
    with pytest.raises(ConfigurationError, match=rf"a step with 5 samples fails: {HERE}:\d+"):
        found.peak(5)
    assert found.largest_batch(10**6) == 4
    assert list(found.steps) == [4]


def test_optimisation_by_hand_is_predicted() -> None:
    class Manual(Plain):
        def __init__(self, step: Any) -> None:
            super().__init__(step)
            self.automatic_optimization = False

    def step(module: Any, batch: Tensor) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.layer(batch).square().mean())
        optimizer.step()

    found = trace_step(lambda: Manual(step), torch.rand(4, 6), StepSettings())
    peak = found.peak(4)
    assert set(peak.phases) == {"forward", "backward", "optimizer step"}
    assert peak.parts["parameter"] == 42 * 4


def test_real_steps_run_with_parts_of_the_batch() -> None:
    sizes: list[int] = []

    def step(module: Any, batch: Tensor) -> Tensor:
        sizes.append(len(batch))
        return module.layer(batch).square().mean()

    found = measure_step(lambda: Plain(step), torch.rand(8, 6), StepSettings())
    assert found.method == "measured"
    assert sorted(set(sizes)) == [2, 4, 8]
    exact = traced(lambda module, batch: module.layer(batch).square().mean(), torch.rand(8, 6))
    for size in (2, 8, 50):
        assert found.peak(size).nbytes == pytest.approx(exact.peak(size).nbytes, rel=1e-6)


@pytest.mark.parametrize(
    "batch",
    [
        (torch.rand(4, 3), torch.rand(4)),
        {"x": torch.rand(4, 3), "names": "all", "scale": torch.tensor(2.0)},
        [torch.rand(3, 5, width) for width in (1, 2, 3, 4)],
        # Images of other sizes, with what belongs to each.
        {"images": [torch.rand(3, 5, width) for width in (1, 2, 3, 4)], "targets": [{"box": torch.rand(2, 4)}] * 4},
        ([torch.rand(3, 5, width) for width in (1, 2, 3, 4)], torch.rand(4), (640, 480), "train"),
    ],
)
def test_batches_are_made_of_other_sizes(batch: Any) -> None:
    assert size_of_batch(batch) == 4
    for size in (1, 3, 11):
        other = batch_of_size(batch, size)
        assert type(other) is type(batch)
        assert size_of_batch(other) == size


def test_samples_repeat_in_larger_batches() -> None:
    batch = torch.arange(3)
    assert batch_of_size(batch, 7).tolist() == [0, 1, 2, 0, 1, 2, 0]
    images, labels = batch_of_size(([torch.rand(3, 1, 2), torch.rand(3, 2, 2)], torch.tensor([5, 6])), 3)
    assert [image.size(1) for image in images] == [1, 2, 1]
    assert labels.tolist() == [5, 6, 5]


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="its tensors differ there"):
        size_of_batch((torch.rand(4, 3), torch.rand(5, 3)))


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp9"},
        {"accumulate_grad_batches": 0},
        {"activation_checkpointing": "layer"},
        {"device": "tpu"},
    ],
)
def test_wrong_settings_are_refused(settings: Any) -> None:
    with pytest.raises(ConfigurationError):
        StepSettings(**settings)
