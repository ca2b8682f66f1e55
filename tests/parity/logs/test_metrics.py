"""torchmetrics objects in `self.log`: computed and reset at the right moment, alone and in collections."""

from typing import Any

from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

from .. import data
from ..data import CLASSES
from ..harness import Case, columns, parity
from ..modules import Classifier


class WithMetric(Classifier):
    """Logs the object itself, updated by its call."""

    flags: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        self.train_accuracy(self(features), labels)
        self.log("train_accuracy", self.train_accuracy, **self.flags)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        features, labels = batch
        self.val_accuracy(self(features), labels)
        self.log("val_accuracy", self.val_accuracy, **self.flags)


class ByStepAndEpoch(WithMetric):
    flags = {"on_step": True, "on_epoch": True, "prog_bar": True}


class LogsAtEpochEnd(WithMetric):
    """Updates in steps, logs the object only at the epoch's end."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.val_accuracy.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("val_accuracy", self.val_accuracy)


class WithCollection(Classifier):
    """Two collections of metrics, one of them cloned with a prefix, and aggregators."""

    def __init__(self) -> None:
        super().__init__()
        metrics = {"accuracy": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)}
        self.train_metrics = MetricCollection(metrics, prefix="train/")
        self.val_metrics = self.train_metrics.clone(prefix="val/")
        self.aggregators = nn.ModuleDict({"mean": MeanMetric(), "sum": SumMetric(), "min": MinMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        loss = self.loss(batch)
        self.train_metrics(self(features), labels)
        self.log_dict(self.train_metrics, on_step=True, on_epoch=True)
        for name, aggregator in self.aggregators.items():
            aggregator(loss.detach())
            self.log(f"{name}_loss", aggregator)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.val_metrics.update(self(batch[0]), batch[1])
        self.log_dict(self.val_metrics, on_epoch=True)


class PerLoader(WithMetric):
    """One metric for each validation loader."""

    def __init__(self) -> None:
        super().__init__()
        self.per_loader = nn.ModuleList([MulticlassAccuracy(CLASSES), MulticlassAccuracy(CLASSES)])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        metric = self.per_loader[dataloader_idx]
        metric(self(batch[0]), batch[1])
        self.log(f"accuracy_{dataloader_idx}", metric, add_dataloader_idx=False)
        self.log("loss", self.loss(batch))


class Nested(WithMetric):
    """The metric hides in a list of no module, so its attribute must be named."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.ModuleDict({"inner": MulticlassAccuracy(CLASSES)})

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.hidden["inner"](self(batch[0]), batch[1])
        self.log("named", self.hidden["inner"], metric_attribute="hidden.inner")


class Matrix(WithMetric):
    """Logs a metric whose value is no scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = MulticlassConfusionMatrix(CLASSES)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.matrix(self(batch[0]), batch[1])
        self.log("matrix", self.matrix)


CASES = [
    Case(
        name="by-step-and-epoch",
        module=ByStepAndEpoch,
        data=data.odd,
        proves=lambda r: "val_accuracy_epoch" in columns(r),
    ),
    Case(name="at-epoch-end", module=LogsAtEpochEnd, data=data.odd),
    Case(
        name="collections",
        module=WithCollection,
        data=data.odd,
        proves=lambda r: {"val/f1", "train/f1_epoch"} <= columns(r),
    ),
    Case(name="one-per-loader", module=PerLoader, data=data.several_val),
    Case(name="named-attribute", module=Nested),
    Case(name="not-a-scalar", module=Matrix, raises=ValueError),
]

test_parity = parity(CASES)
