"""The same work through the frameworks, each as its documentation writes it."""

import contextlib
import csv
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from workload import (
    LEARNING_RATE,
    Classifier,
    LoaderOf,
    LoggingClassifier,
    TimedBatches,
    loader_of,
    loader_of_samples,
    network,
)

__all__ = ["ALL", "LOG_EVERY", "Contestant", "frameworks", "quiet_trainer"]

Contestant = Callable[[TimedBatches], nn.Module]
LOG_EVERY = 50


class Terminal(io.TextIOWrapper):
    """A terminal without a screen: bars draw as they do for a user."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Sends what is printed to such a terminal, 120 columns wide."""
    size = {"COLUMNS": "120", "LINES": "40", "TERM": "xterm-256color"}
    before = {name: os.environ.get(name) for name in size}
    os.environ.update(size)
    screen = Terminal(open(os.devnull, "wb"), write_through=True)  # noqa: SIM115  closed below, with its wrapper
    try:
        with screen, contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


ALL = ("equipoise", "lightning", "fabric", "accelerate", "ignite")


def frameworks(names: Container[str] = ALL) -> dict[str, dict[str, Contestant]]:
    """Contestants, by framework and load; frameworks that are not installed are left out."""
    found = {}
    makers = (_equipoise, _lightning, _fabric, _accelerate, _ignite)
    for name, make in zip(map(str.capitalize, ALL), makers, strict=True):
        if name.lower() not in names:
            continue
        with contextlib.suppress(ModuleNotFoundError):
            found[name] = make()
    return found


def _equipoise() -> dict[str, Contestant]:
    from equipoise import Trainer

    def compiled(data: TimedBatches) -> nn.Module:
        module = Classifier()
        quiet_trainer(Trainer, compile=True).fit(module, loader_of(data))
        return module.network

    return {**_trainer_loads(Trainer), "compiled": compiled}


def _lightning() -> dict[str, Contestant]:
    from lightning import Trainer

    return _trainer_loads(Trainer)


def _trainer_loads(trainer_class: Callable[..., Any]) -> dict[str, Contestant]:
    """The loads of a trainer that takes a LightningModule."""

    def fit(data: TimedBatches, module: Classifier, *, loader: LoaderOf = loader_of, **options: Any) -> nn.Module:
        quiet_trainer(trainer_class, **options).fit(module, loader(data))
        return module.network

    def full(data: TimedBatches, on_epoch: bool) -> nn.Module:
        from lightning.pytorch.loggers import CSVLogger

        with tempfile.TemporaryDirectory() as folder, terminal():
            module = LoggingClassifier(on_epoch=on_epoch)
            return fit(data, module, logger=CSVLogger(folder), log_every_n_steps=LOG_EVERY, enable_progress_bar=True)

    def evaluate(data: TimedBatches) -> nn.Module:
        module = Classifier()
        quiet_trainer(trainer_class).validate(module, loader_of(data), verbose=False)
        return module.network

    return {
        "bare": lambda data: fit(data, Classifier()),
        "logs": lambda data: fit(data, LoggingClassifier()),
        "full": lambda data: full(data, on_epoch=False),
        "full with epoch values": lambda data: full(data, on_epoch=True),
        "samples": lambda data: fit(data, Classifier(), loader=loader_of_samples),
        "accumulation": lambda data: fit(data, Classifier(), accumulate_grad_batches=4),
        "evaluation": evaluate,
    }


def quiet_trainer(trainer_class: Callable[..., Any], **options: Any) -> Any:
    """Return a trainer of one epoch on the CPU, without logger, bar, checkpoints and summary."""
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    return trainer_class(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **options})


class _Table:
    """A table that is written every fifty steps, for loops that bring none."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, list[dict[str, float]]()

    def write(self, values: dict[str, float], step: int) -> None:
        self.rows.append({"step": step, **values})
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["step", *values])
            writer.writeheader()
            writer.writerows(self.rows)


def _fabric() -> dict[str, Contestant]:
    from lightning.fabric import Fabric

    def train(
        data: TimedBatches,
        window: int = 1,
        report: Callable[[Any, Any, int], None] | None = None,
        loader: LoaderOf = loader_of,
        **options: Any,
    ) -> nn.Module:
        fabric = Fabric(accelerator="cpu", devices=1, **options)
        plain = network()
        model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), LEARNING_RATE))
        batches = fabric.setup_dataloaders(loader(data))
        for index, (features, labels) in enumerate(batches):
            loss = F.cross_entropy(model(features), labels)
            fabric.backward(loss if window == 1 else loss / window)
            if (index + 1) % window == 0:
                optimizer.step()
                optimizer.zero_grad()
            if report is not None:
                report(fabric, loss, index)
        return plain

    def logs(fabric: Any, loss: Any, index: int) -> None:
        fabric.log("loss", loss, step=index)
        fabric.log("again", loss, step=index)

    def full(data: TimedBatches) -> nn.Module:
        from lightning.fabric.loggers import CSVLogger
        from tqdm import tqdm

        with tempfile.TemporaryDirectory() as folder, terminal(), tqdm(total=len(data)) as bar:

            def report(fabric: Any, loss: Any, index: int) -> None:
                bar.update()
                if index % LOG_EVERY == 0:
                    fabric.log_dict({"loss": loss.item(), "again": loss.item()}, step=index)

            return train(data, report=report, loggers=CSVLogger(folder))

    def evaluate(data: TimedBatches) -> nn.Module:
        fabric = Fabric(accelerator="cpu", devices=1)
        plain = network()
        model, loader = fabric.setup(plain).eval(), fabric.setup_dataloaders(loader_of(data))
        with torch.inference_mode():
            for features, labels in loader:
                F.cross_entropy(model(features), labels)
        return plain

    return {
        "bare": train,
        "logs": lambda data: train(data, report=logs),
        "full": full,
        "samples": lambda data: train(data, loader=loader_of_samples),
        "accumulation": lambda data: train(data, window=4),
        "evaluation": evaluate,
    }


def _accelerate() -> dict[str, Contestant]:
    from accelerate import Accelerator

    def train(
        data: TimedBatches,
        window: int = 1,
        report: Callable[[Any, Any, int], None] | None = None,
        loader: LoaderOf = loader_of,
    ) -> nn.Module:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
        plain = network()
        optimizer = torch.optim.SGD(plain.parameters(), LEARNING_RATE)
        model, optimizer, batches = accelerator.prepare(plain, optimizer, loader(data))
        for index, (features, labels) in enumerate(batches):
            with accelerator.accumulate(model) if window > 1 else contextlib.nullcontext():
                loss = F.cross_entropy(model(features), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if report is not None:
                report(accelerator, loss, index)
        return accelerator.unwrap_model(model)

    def logs(accelerator: Any, loss: Any, index: int) -> None:
        accelerator.log({"loss": loss, "again": loss}, step=index)

    def full(data: TimedBatches) -> nn.Module:
        from tqdm import tqdm

        with tempfile.TemporaryDirectory() as folder, terminal(), tqdm(total=len(data)) as bar:
            table = _Table(Path(folder, "metrics.csv"))

            def report(accelerator: Any, loss: Any, index: int) -> None:
                bar.update()
                if index % LOG_EVERY == 0:
                    table.write({"loss": loss.item(), "again": loss.item()}, index)

            return train(data, report=report)

    def evaluate(data: TimedBatches) -> nn.Module:
        accelerator = Accelerator(cpu=True)
        model, loader = accelerator.prepare(network(), loader_of(data))
        model.eval()
        with torch.inference_mode():
            for features, labels in loader:
                F.cross_entropy(model(features), labels)
        return accelerator.unwrap_model(model)

    return {
        "bare": train,
        "logs": lambda data: train(data, report=logs),
        "full": full,
        "samples": lambda data: train(data, loader=loader_of_samples),
        "accumulation": lambda data: train(data, window=4),
        "evaluation": evaluate,
    }


def _ignite() -> dict[str, Contestant]:
    with warnings.catch_warnings():
        # Ignite imports what torch deprecates.
        warnings.simplefilter("ignore")
        from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer

    def train(
        data: TimedBatches,
        window: int = 1,
        report: Callable[[Any], None] | None = None,
        loader: LoaderOf = loader_of,
    ) -> nn.Module:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        engine = create_supervised_trainer(model, optimizer, F.cross_entropy, "cpu", gradient_accumulation_steps=window)
        if report is not None:
            engine.add_event_handler(Events.ITERATION_COMPLETED, report)
        engine.run(loader(data), max_epochs=1)
        return model

    def logs(engine: Any) -> None:
        engine.state.metrics["loss"] = engine.state.output
        engine.state.metrics["again"] = engine.state.output

    def full(data: TimedBatches) -> nn.Module:
        from tqdm import tqdm

        with tempfile.TemporaryDirectory() as folder, terminal(), tqdm(total=len(data)) as bar:
            table = _Table(Path(folder, "metrics.csv"))

            def report(engine: Any) -> None:
                logs(engine)
                bar.update()
                if engine.state.iteration % LOG_EVERY == 0:
                    table.write(dict(engine.state.metrics), engine.state.iteration)

            return train(data, report=report)

    def evaluate(data: TimedBatches) -> nn.Module:
        model = network()
        create_supervised_evaluator(model, device="cpu").run(loader_of(data))
        return model

    return {
        "bare": train,
        "logs": lambda data: train(data, report=logs),
        "full": full,
        "samples": lambda data: train(data, loader=loader_of_samples),
        "accumulation": lambda data: train(data, window=4),
        "evaluation": evaluate,
    }
