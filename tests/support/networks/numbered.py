"""Numbered samples, and a network that remembers in which process and batch it saw each of them."""

from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import Dataset
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

__all__ = ["Numbered", "Samples", "has_same_weights_everywhere", "numbered"]


class Samples(Dataset[Any]):
    """Samples of four features, one of three labels, and their number."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(11)
        self.features, self.labels = torch.randn(count, 4, dtype=torch.float64), torch.randint(3, (count,))

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> Any:
        return self.features[index], self.labels[index], index


class Numbered(L.LightningModule):
    """A classifier of `Samples`.

    Attributes:
        seen: For each epoch and process, the numbers of the samples of each batch.
        same: Whether all processes had the same weights at the end of every epoch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.accuracy, self.auroc = MulticlassAccuracy(3), BinaryAUROC()
        self.seen: list[list[list[int]]] = []
        self.same = True

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen[-1].append(batch[2].tolist())
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen[-1] = self.trainer.strategy.gather_objects(self.seen[-1])
        self.same = self.same and has_same_weights_everywhere(self)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        self.accuracy(logits, batch[1])
        self.auroc(logits[:, 0].sigmoid(), batch[1] == 0)
        self.log("accuracy", self.accuracy)
        self.log("auroc", self.auroc)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[2]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbered(kind: type[Numbered] = Numbered, *arguments: Any) -> Any:
    """A module of a kind, with the same weights each time."""
    torch.manual_seed(3)
    return kind(*arguments)


def has_same_weights_everywhere(module: L.LightningModule) -> bool:
    """Return True if the module has the same bits in all processes."""
    first, *others = module.trainer.strategy.gather_objects([p.detach().clone() for p in module.parameters()])
    return all(all(map(torch.equal, first, other)) for other in others)
