"""A fit with evaluations in its midst, and everything that it leaves behind, which must be as without them."""

import csv
import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from equipoise import NoGradEvaluation
from tests.support.trainer_runs import trainer as quiet

__all__ = ["Plain", "accuracy", "made", "rows", "samples", "trained"]


class Wild(L.LightningModule):
    """Draws from every generator in forward, in training and in evaluation; keeps a hidden state and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.frozen = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(3)
        self.own = numpy.random.default_rng(4)
        self.hidden: Tensor | None = None
        self.losses: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.frozen.eval()

    def forward(self, features: Tensor) -> Tensor:
        noise = random.random() + numpy.random.rand() + float(torch.rand((), generator=self.generator))
        noise += float(self.own.random()) + float(torch.rand(()))
        self.calls += 1
        self.hidden = features.detach().mean() + (0 if self.hidden is None else 0.5 * self.hidden)
        output = self.net(features)
        return output + self.frozen(output) + 1e-2 * noise + 1e-3 * self.calls + 1e-2 * self.hidden

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]).float(), batch[1])
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Noisy(Dataset[Any]):
    """Samples with noise that a generator of the data's own draws, as augmentation does."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.features, self.labels = torch.randn(count, 4, generator=generator), torch.arange(count) % 3
        self.generator = numpy.random.default_rng(8)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> Any:
        return self.features[index] + 0.01 * float(self.generator.random()), self.labels[index]


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.arange(count) % 3)


def accuracy() -> MetricCollection:
    return MetricCollection([MulticlassAccuracy(3), MulticlassConfusionMatrix(3)])


def trained(
    kind: type[Any], inference_mode: bool | None, folder: Path, workers: int = 0, size: int = 4, **options: Any
) -> Any:
    """Everything that training leaves behind, with evaluations in its midst or, if None, without."""
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)
    module, data = Wild(), Noisy(24)
    shared = torch.Generator().manual_seed(5)  # of both loaders
    more: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(data, batch_size=size, shuffle=True, generator=shared)
    other = DataLoader(data, batch_size=5, shuffle=True, generator=shared, **more)
    evaluation = NoGradEvaluation(
        other,
        accuracy(),
        every_n_steps=2,
        every_n_epochs=1,
        at_end=True,
        collect=True,
        inference_mode=bool(inference_mode),
    )
    trainer = quiet(
        kind,
        logger=CSVLogger(folder, name=f"{kind.__module__}-{inference_mode}"),
        log_every_n_steps=1,
        max_epochs=3,
        callbacks=[] if inference_mode is None else [evaluation],
        **options,
    )
    trainer.fit(module, loader)
    state = {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict()["state"],
        "losses": module.losses,
        "hidden": module.hidden,
        "modes": [part.training for part in module.modules()],
        "drawn": (torch.rand(3), random.random(), numpy.random.rand(), torch.rand(2, generator=shared)),
        "own": (module.own.random(), data.generator.random(), torch.rand(2, generator=module.generator)),
        "logs": [row for row in rows(trainer) if row.get("loss_step") or row.get("loss_epoch")],
    }
    return state, evaluation


def rows(trainer: Any) -> list[dict[str, str]]:
    with open(Path(trainer.logger.log_dir, "metrics.csv")) as file:
        found = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in found if not any(name.startswith("eval/") for name in row)]


class Plain(L.LightningModule):
    """A classifier.

    Attributes:
        called: In which mode each forward was: training, with gradients, in inference mode.
        batches: The batches of training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3))
        self.called: list[tuple[bool, bool, bool]] = []
        self.batches: list[Tensor] = []

    def forward(self, features: Tensor) -> Tensor:
        self.called.append((self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch[0].clone())
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def made() -> Plain:
    torch.manual_seed(7)
    return Plain()
