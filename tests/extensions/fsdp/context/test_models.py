"""Models of transformers that compute their own loss, packed sequences, and steps without a batch."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.extensions.fsdp.context.networks import DECODER, Gpt, Pretrained, Task, fit, samples
from tests.extensions.fsdp.programs import assert_close, fsdp, in_processes

pytestmark = pytest.mark.slow


class OwnLoss(Task):
    """Leaves the shift of the labels and the loss to the model."""

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.network.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        return loss

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        # Shifted before sequences are divided.
        return {**batch, "labels": nn.functional.pad(batch["shift_labels"], (1, 0), value=-100)[:, :-1]}


class Packed(Task):
    """Three sequences in each sample, which do not see each other."""

    keeps = False

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        positions = torch.cat([torch.arange(3), torch.arange(7), torch.arange(6)])
        return {**batch, "position_ids": positions.expand(batch["input_ids"].shape)}

    def loss(self, batch: Any) -> Tensor:
        # With a cache, transformers takes a sample for one sequence.
        outputs = self.network.model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=self.keeps)
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), batch["shift_labels"].flatten())


class PackedWithCache(Packed):
    keeps = True


def llama(task: Any) -> Any:
    return task(Pretrained("LlamaForCausalLM", **DECODER))


def models() -> list[dict[str, Any]]:
    own = fit(partial(llama, OwnLoss), fsdp(context=2), 2, precision="32-true")
    return [own, *(fit(partial(llama, kind), fsdp(context=2), 2) for kind in (Packed, PackedWithCache))]


def test_models_of_transformers() -> None:
    own, packed, cached = in_processes(2, models)
    # The loss of transformers is computed in float32.
    assert_close(fit(partial(llama, OwnLoss), precision="32-true"), own, tolerance=1e-4)
    assert_close(fit(partial(llama, Packed)), packed, tolerance=1e-10)
    assert_close(fit(partial(llama, PackedWithCache)), cached, tolerance=1e-10)


def ragged() -> dict[str, Any]:
    return fit(lambda: Task(Gpt()), fsdp(context=2), 4, rows=2, count=18)


def test_a_row_without_a_batch() -> None:
    """The last step of an epoch has two samples: a batch for one of two rows."""
    assert_close(fit(lambda: Task(Gpt()), count=18), in_processes(4, ragged), tolerance=1e-10)


def test_samples_have_labels_in_one_process_alone() -> None:
    """The first of four processes has the first and the last two of 16 positions, and the second of them few labels."""
    labels = torch.stack([sample["shift_labels"] for sample in samples()])
    assert (labels[:, :6] == -100).all()
    assert (labels[:, 8:15] != -100).all()
