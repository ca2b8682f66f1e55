"""CSV and TensorBoard loggers for real, several at once, one's own, and hyperparameters."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from ..data import FEATURES
from ..harness import Case, parity
from ..modules import Classifier


class WithExample(Classifier):
    """Has an example input, from which TensorBoard draws the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, FEATURES)


class WritesThings(Classifier):
    """Uses the experiment of its logger."""

    def on_train_epoch_end(self) -> None:
        self.logger.experiment.add_scalar("direct", self.current_epoch / 2, self.global_step)
        self.logger.experiment.add_text("text", f"epoch {self.current_epoch}", self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"a": 1.0 * batch_idx, "group/b": 0.5}, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Parameters(Classifier):
    """Has hyperparameters of many kinds."""

    def __init__(self, width: int = 3, names: Any = ("a", "b"), nested: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(
            {"width": width, "names": list(names), "nested": {"x": 1.5, "deep": {"y": None}}, "on": True}
        )


class Recording(Logger):
    """A logger of the user's, which keeps all calls."""

    name = "duck"
    version = 0
    save_dir = None

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log_hyperparams(self, params: Any) -> None:
        self.calls.append(("hyperparameters", dict(params)))

    def log_graph(self, model: Any) -> None:
        self.calls.append(("graph",))

    def log_metrics(self, *, step: int, metrics: Any) -> None:
        """Take the arguments by their names alone."""
        self.calls.append(("metrics", dict(metrics), step))

    def save(self) -> None:
        self.calls.append(("save",))

    def finalize(self, status: str) -> None:
        self.calls.append(("finalize", status))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        path = checkpoint_callback.last_model_path or checkpoint_callback.best_model_path
        self.calls.append(("saved", Path(path).name))


class Fails(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 3:
            raise ArithmeticError("as asked")
        return super().training_step(batch, batch_idx)


def calls(trainer: Any) -> Any:
    return trainer.logger.calls


def board(root: Path, **options: Any) -> TensorBoardLogger:
    return TensorBoardLogger(root, name="board", version=0, **options)


def evaluate_after(trainer: Any, module: Any, given: Any) -> Any:
    trainer.fit(module, **given)
    trainer.validate(module, given["val_dataloaders"], verbose=False)
    return trainer.test(module, given["val_dataloaders"], verbose=False)


def folders(trainer: Any) -> Any:
    return {
        "log_dir": trainer.log_dir,
        "loggers": [type(logger).__name__ for logger in trainer.loggers],
        "first": type(trainer.logger).__name__,
    }


CASES = [
    Case(name="by-default", logger=lambda root: True, observe=folders, watch=False),
    Case(name="none", logger=lambda root: False, observe=folders, proves=lambda r: r["observed"]["loggers"] == []),
    Case(
        name="csv-versions",
        logger=lambda root: CSVLogger(root),
        observe=folders,
        proves=lambda r: "lightning_logs/version_0/metrics.csv" in r["files"],
    ),
    Case(name="csv-after-evaluation", run=evaluate_after),
    Case(name="tensorboard-own-writes", module=WritesThings, logger=board),
    Case(name="tensorboard-graph", module=WithExample, logger=lambda root: board(root, log_graph=True), watch=False),
    Case(
        name="tensorboard-hyperparameters", module=Parameters, logger=lambda root: board(root, default_hp_metric=False)
    ),
    Case(
        name="both",
        logger=lambda root: [board(root, sub_dir="here"), CSVLogger(root, name="csv", version=0)],
        observe=folders,
        proves=lambda r: r["observed"]["first"] == "TensorBoardLogger",
    ),
    Case(name="own", logger=lambda root: Recording(), observe=calls, proves=lambda r: len(r["observed"]) > 14),
    Case(
        name="own-after-an-error", module=Fails, logger=lambda root: Recording(), observe=calls, raises=ArithmeticError
    ),
    Case(name="hyperparameters-not-logged", module=Parameters, options={"enable_autolog_hparams": False}),
    Case(
        name="fast-dev-run-writes-nothing",
        options={"fast_dev_run": True},
        observe=folders,
        proves=lambda r: not r["files"],
    ),
]

test_parity = parity(CASES)
