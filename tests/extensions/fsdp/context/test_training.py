"""Training on sequences that are divided over processes: equal to one device, in float64."""

from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.extensions.fsdp.context.networks import CASES, DECODER, ONE_ROW, Gpt, Task, fit, of_transformers, samples
from tests.extensions.fsdp.programs import assert_same_in_processes, fsdp

pytestmark = pytest.mark.slow


@cache
def on_one_device(case: str) -> dict[str, Any]:
    make, options = CASES[case]
    return fit(make, **options)


@pytest.mark.parametrize(
    ("rows", "context"), [(1, 2), (1, 4), (2, 2)], ids=["context 2", "context 4", "data 2 x context 2"]
)
def test_training_on_divided_sequences_equals_that_of_one_device(rows: int, context: int) -> None:
    cases = [case for case in CASES if rows == 1 or case not in ONE_ROW]
    expected, calls = {}, {}
    for case in cases:
        make, options = CASES[case]
        expected[case] = partial(on_one_device, case)
        calls[case] = partial(fit, make, fsdp(context=context), rows * context, rows=rows, **options)
    assert_same_in_processes(rows * context, expected, calls, tolerance=1e-10)


def test_a_row_without_a_batch() -> None:
    """The last step of an epoch has two samples: a batch for one of two rows."""
    run = partial(fit, lambda: Task(Gpt()), count=18)
    assert_same_in_processes(4, {"ragged": run}, {"ragged": partial(run, fsdp(context=2), 4, rows=2)}, 1e-10)


class OwnLoss(Task):
    """Leaves the shift of the labels and the loss to the model."""

    def loss(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.network.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        return loss

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        # Shifted before sequences are divided.
        return {**batch, "labels": torch.nn.functional.pad(batch["shift_labels"], (1, 0), value=-100)[:, :-1]}


class Packed(Task):
    """Three sequences in each sample, which do not see each other."""

    keeps = False

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        positions = torch.cat([torch.arange(3), torch.arange(7), torch.arange(6)])
        return {**batch, "position_ids": positions.expand(batch["input_ids"].shape)}

    def loss(self, batch: Any) -> torch.Tensor:
        # With a cache, transformers takes a sample for one sequence.
        outputs = self.network.model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=self.keeps)
        return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), batch["shift_labels"].flatten())


class PackedWithCache(Packed):
    keeps = True


@pytest.mark.parametrize(
    ("kinds", "precision", "tolerance"),
    # The loss of transformers is computed in float32.
    [([OwnLoss], "32-true", 1e-4), ([Packed, PackedWithCache], "64-true", 1e-10)],
    ids=["own loss", "packed"],
)
def test_models_with_a_loss_of_their_own_and_packed_sequences(kinds: Any, precision: str, tolerance: float) -> None:
    runs = {}
    for kind in kinds:
        make = of_transformers("LlamaForCausalLM", kind, **DECODER)
        runs[kind.__name__] = partial(fit, make, precision=precision)
    calls = {name: partial(run, fsdp(context=2), 2) for name, run in runs.items()}
    assert_same_in_processes(2, runs, calls, tolerance)


def test_samples_have_labels_in_one_process_alone() -> None:
    """The first of four processes has the first and the last two of 16 positions, and the second of them few labels."""
    labels = torch.stack([sample["shift_labels"] for sample in samples()])
    assert (labels[:, :6] == -100).all()
    assert (labels[:, 8:15] != -100).all()
