"""Models of transformers that compute their own loss, packed sequences, dropout, steps without a batch, checkpoints."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests.conftest import ignoring
from tests.extensions.fsdp.context.networks import DECODER, POSITIONS, Gpt, Pretrained, Task, fit, samples
from tests.extensions.fsdp.programs import assert_close, fsdp, in_processes

pytestmark = [pytest.mark.slow, *ignoring("Checkpoint directory", "The checkpoint holds states of callbacks")]


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


class Dropping(Task):
    """Notes what dropout leaves of ones, in the module and in the process."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any) -> Any:
        ones = torch.ones_like(batch["input_ids"], dtype=torch.float64)
        self.kept += [nn.functional.dropout(ones, 0.5), torch.rand(4)]
        return super().training_step(batch)


def dropped() -> Any:
    module = Dropping(Gpt())
    fit(lambda: module, fsdp(context=2), 2, module=module, max_epochs=1, count=4)
    rank = torch.distributed.get_rank()
    found: list[Any] = [None, None]
    torch.distributed.all_gather_object(found, (rank, module.kept))
    return found


def test_dropout_differs_between_parts() -> None:
    """All other random numbers are the same in all processes of a row, such as noise of each sample."""
    (_, first), (_, second) = in_processes(2, dropped)
    assert first[0].shape == (4, POSITIONS // 2)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def ragged() -> dict[str, Any]:
    return fit(lambda: Task(Gpt()), fsdp(context=2), 4, rows=2, count=18)


def test_a_row_without_a_batch() -> None:
    """The last step of an epoch has two samples: a batch for one of two rows."""
    assert_close(fit(lambda: Task(Gpt()), count=18), in_processes(4, ragged), tolerance=1e-10)


@pytest.mark.parametrize("checkpoints", ["full", "sharded"])
def test_one_device_continues_from_a_checkpoint(checkpoints: str, tmp_path: Path) -> None:
    def make() -> L.LightningModule:
        return Task(Gpt())

    saves = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [saves], "enable_checkpointing": True}
    fit(make, fsdp(context=2, checkpoints=checkpoints), 2, max_epochs=1, **options)
    (path,) = tmp_path.iterdir()
    expected = fit(make)
    assert_close(expected, fit(make, ckpt_path=path), tolerance=1e-10)


def test_samples_have_labels_in_one_process_alone() -> None:
    """The first of four processes has the first and the last two of 16 positions, and the second of them few labels."""
    labels = torch.stack([sample["shift_labels"] for sample in samples()])
    assert (labels[:, :6] == -100).all()
    assert (labels[:, 8:15] != -100).all()
