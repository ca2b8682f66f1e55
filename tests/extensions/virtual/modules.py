"""Networks whose steps draw numbers, log, and change their buffers and attributes, and data that draw as well."""

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, R2Score

SAMPLES = 115


class Noisy(L.LightningModule):
    """Statistics of a batch, dropout, and numbers of three generators."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1)]
        self.net = nn.Sequential(*layers)
        self.seldom_used = nn.Linear(6, 1)
        self.mean = MeanMetric()
        self.metrics = MetricCollection([MeanSquaredError(), R2Score()])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, targets = batch
        noise = torch.from_numpy(np.random.randn(*features.shape)).float()
        outputs = self.net(features * random.uniform(0.9, 1.1) + 0.01 * noise)
        if features[0, 0] > 1:
            outputs = outputs + self.seldom_used(features)
        loss = nn.functional.mse_loss(outputs, targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.mean(outputs.detach())
        self.log("mean", self.mean)
        self.log("largest", outputs.detach().max(), reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, targets = batch
        outputs = self.net(features)
        self.log("val_loss", nn.functional.mse_loss(outputs, targets))
        self.metrics.update(outputs, targets)
        self.log_dict(self.metrics)
        self.log("val_sum", targets.sum(), reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Plain(Noisy):
    """Layers that take parts of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 1))


class Weighed(Noisy):
    """The loss weighs as much as its targets do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "loss_weight": batch[1].abs().sum()}


class Skipping(Noisy):
    """Some parts have no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch[0][0, 1] > 0.5 else loss


class FirstPartSkipped(Plain):
    """The first part of the run has no loss; loss weights are far from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.parts_seen: list[None] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        first = self.trainer.global_step == 0 and not self.parts_seen
        self.parts_seen.append(None)
        return None if first and self.trainer.global_rank == 0 else {"loss": loss, "loss_weight": 3 * len(batch[0])}


class Stateful(Noisy):
    """A buffer that the step replaces, and attributes that it reads and changes, of which one is new."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.count, self.newest = 0, torch.zeros(6)
        self.net[0].factor = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        self.average = 0.9 * self.average + batch[0].mean(0)
        self.newest = 0.5 * self.newest + batch[0].mean(0)
        self.net[0].factor *= 0.99
        self.last = super().training_step(batch, batch_idx)
        loss = self.last * self.net[0].factor / self.count
        return loss + ((self.average + self.newest) * self.net[0].weight).sum()

    def on_train_batch_end(self, *args: Any) -> None:
        assert self.count == self.trainer.global_step


class Sparse(Noisy):
    """An embedding with gradients that are sparse in some parts and dense in others; a weight is laid out otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6, sparse=True)
        self.convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, targets = batch
        if features[0, 0] < 1:
            features = features + self.embedding((features * 4).long().abs() % 9).sum(1)
        elif features[0, 0] < 1.5:
            features = features + self.embedding.weight.mean(0)
        images = features[:, None, None, :4].expand(-1, 2, 3, -1)
        targets = targets + self.convolution(images).mean((1, 2, 3))[:, None]
        return super().training_step((features, targets), batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Neighbours(Noisy):
    """Adds features of neighbours, of which a sparse buffer holds the matrix, and the processes have other ones."""

    entries_of_others = 6

    def setup(self, stage: str) -> None:
        matrix = torch.eye(6) + torch.eye(6).flip(0)
        if self.global_rank:
            matrix = torch.diag(torch.arange(6) < self.entries_of_others).float() + torch.eye(6).flip(0)
            matrix *= 2
        self.register_buffer("graph", matrix.to_sparse_csr(), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, targets = batch
        return super().training_step(((self.graph @ features.T).T, targets), batch_idx)


class OtherEntries(Neighbours):
    """Another number of entries in other processes."""

    entries_of_others = 5


class RandomHooks(Noisy):
    """Draws in evaluation steps and hooks, also to augment batches once they are on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.rand(()), *batch[1:]]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("drawn", torch.rand(()))

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        torch.rand(())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_loss", torch.rand(()) + random.random() + batch[0].sum())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[1] + torch.rand(())


class LoggingHooks(Noisy):
    """Logs around the backward of each part and in other hooks what all processes know; the first one logs for all."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("before", loss.detach(), on_epoch=True)

    def on_after_backward(self) -> None:
        self.log("after", self.net[0].weight.grad.norm(), on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("of_step", outputs["loss"])
        self.log("rate", 0.25 + batch_idx, on_epoch=True, batch_size=1)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("first", 0.5 / (1 + self.current_epoch), rank_zero_only=True)


class Augmented(Dataset[Any]):
    """Samples that draw from three generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features = torch.arange(6.0) * random.random() + torch.randn(6) + float(np.random.rand())
        return features, features.sum(0, keepdim=True) + index


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
        lengths = torch.tensor([[float(len(text))] for text in texts])
        return super().training_step((features, targets + lengths), batch_idx)


def noisy_collate(samples: list[Any]) -> list[Tensor]:
    """Draw, and depend on all samples that are collated together."""
    features, targets = map(torch.stack, zip(*samples, strict=True))
    return [features + features.mean() + torch.randn(()), targets]
