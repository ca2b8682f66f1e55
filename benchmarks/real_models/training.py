"""Trains a model on one device and in a pipeline, and compares the weights."""

import json
import logging
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning as L
import torch
from best_cut import MeasuredCalls, calls_noted
from catalogue import Model
from stage_costs import StageCosts, devices_apart
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from equipoise import ConfigurationError, PipelineStrategy, Trainer

__all__ = ["GraphTask", "Task", "deviation", "judge"]

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
    "precision": "64-true",
}
MOMENTUM = 0.9
IGNORED = -100
"""The label of a token that does not count."""


class Task(L.LightningModule):
    """Calls a model on its batch, without a change of the model.

    Args:
        net: The model.
        loss: See `catalogue.Model`.
        constants: Arguments that belong to all samples.
    """

    def __init__(self, net: nn.Module, loss: str, constants: Mapping[str, Any]) -> None:
        super().__init__()
        self.net = net
        self.loss = loss
        self.constants = constants
        self.rate = 0.0
        _without_dropout(net)

    def train(self, mode: bool = True) -> "Task":
        """Statistics of batches stay frozen, since those of micro-batches are others."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(**batch, **self.constants)
        if self.loss == "outputs":
            return _distance_from_waves(outputs)
        weight = len(next(iter(batch.values())))
        if self.loss != "samples":
            labels = batch["labels"]
            if self.loss == "next labels":
                labels = labels[:, 1:]
            weight = (labels != IGNORED).sum()
        return {"loss": outputs.loss, "loss_weight": weight}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=MOMENTUM)


class GraphTask(Task):
    """A model of torch_geometric, with what tells how a batch of graphs is taken apart."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return _distance_from_waves(self.net(batch.x, batch.edge_index))

    def batch_size(self, batch: Any) -> int:
        return int(batch.num_graphs)

    def split_batch(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        from torch_geometric.data import Batch

        graphs = batch.to_data_list()
        ends = list(accumulate(sizes))
        return [Batch.from_data_list(graphs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def task_of(model: Model) -> Task:
    """The module that trains a model."""
    kind = GraphTask if model.graphs else Task
    return kind(model.make(), model.loss, dict(model.constants))


def _without_dropout(net: nn.Module) -> None:
    """Lets layers drop nothing, in which a configuration without dropout would result."""
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if type(module).__name__ == "StochasticDepth":  # of torchvision
            module.p = 0.0
        if type(module).__name__ == "DropPath":  # of timm
            module.drop_prob = 0.0
        if type(module).__name__ == "LabelEmbedding":  # of diffusers
            module.dropout_prob = 0.0


def _distance_from_waves(outputs: Any) -> Tensor:
    """The mean over samples of the squared distance of all outputs from fixed values.

    Squares of the outputs alone would say little: behind a normalisation their sum is always the same.
    """
    losses = []
    for output in _floating(outputs):
        numbers = torch.arange(output[0].numel(), dtype=torch.float64, device=output.device)
        waves = torch.cos(numbers).reshape(output[0].shape)
        losses.append((output - waves).square().mean())
    return torch.stack(losses).sum()


def _floating(outputs: Any) -> Iterator[Tensor]:
    """The floating-point tensors of an output that depend on weights, of whatever class the output is."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point() and outputs.requires_grad:
            yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _floating(value)
    elif isinstance(outputs, tuple | list):
        for value in outputs:
            yield from _floating(value)


class _Notes(L.Callback):
    """Writes the cut, and the best possible one by the same times, into a file, from whichever process trains.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._measured = MeasuredCalls()
        self._noting: Any = None

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._noting = calls_noted(self._measured)
        self._noting.__enter__()

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self._noting.__exit__(None, None, None)
        self._noting = None

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        network = trainer.strategy._run.network
        if self.path.exists() or network.cut is None:
            return
        times = [stage.forward + stage.backward for stage in network.cut.stages]
        traces = [trace for traces in network._traces._compared.values() for trace in traces]
        opaque = {name: reason for trace in traces for name, reason in trace.opaque.items()}
        notes = {
            "followed_by": "recording" if network._stacked is None else "stack",
            "names": network.cut.first_blocks[1:],
            "to_mean": max(times) * len(times) / sum(times),
            "opaque": opaque,
            **self._measured.notes(),
        }
        self.path.write_text(json.dumps(notes))


class _Watch(TorchFunctionMode):
    """Notes whether a function returns a tensor in single precision that depends on weights."""

    single = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype is torch.float32 and result.requires_grad:
            self.single = True
        return result


def batches_of(model: Model) -> list[Any]:
    """The batches, equal in each run."""
    generator = torch.Generator().manual_seed(1)
    return [model.batch(size, generator) for size in model.sizes]


def _same(batch: Any) -> Any:
    return batch


@contextmanager
def double_precision() -> Iterator[None]:
    """Tensors are made in double precision, as in a run in this precision."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def prepared(model: Model) -> Task:
    """A new copy of a model before training, always the same."""
    L.seed_everything(7, verbose=False)
    task = task_of(model).double()
    norms = [module for module in task.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms and model.library in ("timm", "torchvision"):
        # Values of deep networks grow without bound under the statistics with which layers begin.
        nn.Module.train(task)
        for norm in norms:
            norm.momentum = None
        with double_precision():
            task.training_step(batches_of(model)[0], 0)
    return task.train()


def train(model: Model, rate: float, callbacks: Sequence[L.Callback] = (), **options: Any) -> Task:
    """Trains a new copy of a model."""
    task = prepared(model)
    task.rate = rate
    loader = DataLoader(batches_of(model), batch_size=None, collate_fn=_same)
    trainer = Trainer(**QUIET, callbacks=list(callbacks), **options)
    trainer.fit(task, loader)
    return task


def deviation(begun: nn.Module, expected: nn.Module, actual: nn.Module) -> float:
    """The distance of weights from the expected ones, as a share of the way that those went."""
    distance, way = 0.0, 0.0
    for first, one, other in zip(begun.parameters(), expected.parameters(), actual.parameters(), strict=True):
        distance += float((other.detach().double() - one.detach().double()).square().sum())
        way += float((one.detach().double() - first.detach().double()).square().sum())
    return float("inf") if way == 0 else (distance / way) ** 0.5


def begin(model: Model) -> tuple[Task, bool]:
    """A model before training, and whether it computes in single precision although its weights are in double.

    Its rate is that with which the first step has the chosen length.
    """
    task = prepared(model)
    with double_precision(), _Watch() as watch:
        result = task.training_step(batches_of(model)[0], 0)
    loss = result if isinstance(result, Tensor) else result["loss"]
    loss.backward()
    weights = [parameter for parameter in task.parameters() if parameter.grad is not None]
    gradients = [parameter.grad for parameter in weights if parameter.grad is not None]
    task.rate = model.first_step * _norm(weights) / _norm(gradients)
    return task, watch.single


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm([tensor.detach() for tensor in tensors]))


def judge(model: Model, engines: Iterable[str], record: Path) -> None:
    """Trains a model on one device and with each engine; writes what became of it, also of the first engines alone.

    Args:
        model: The model.
        engines: "threads" and "processes".
        record: The file to write. If it exists, the engines are added to those in it.
    """
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "equipoise"):
        logging.getLogger(name).setLevel(logging.ERROR)
    row: dict[str, Any] = {"engines": {}}
    if record.exists():
        row = json.loads(record.read_text())
        row.pop("error", None)
    try:
        begun, row["single_precision"] = begin(model)
        row["parameters"] = sum(parameter.numel() for parameter in begun.parameters())
        expected = train(model, begun.rate, strategy="single_device", devices=1)
    except Exception:
        row["error"] = traceback.format_exc()
        record.write_text(json.dumps(row))
        return
    for engine in engines:
        row["engines"][engine] = _pipelined(model, engine, begun, expected, record.with_suffix(f".{engine}.json"))
        record.write_text(json.dumps(row))


def _pipelined(model: Model, engine: Any, begun: Task, expected: Task, notes: Path) -> dict[str, Any]:
    """Return the outcome of a model with an engine."""
    start = time.monotonic()
    found: dict[str, Any] = {}
    notes.unlink(missing_ok=True)
    strategy = PipelineStrategy(micro_batches=2, engine=engine)
    costs = StageCosts()
    # Stages in other processes allocate their memory there.
    measures = engine == "threads"
    callbacks = [_Notes(notes), costs] if measures else [_Notes(notes)]
    try:
        with devices_apart() if measures else nullcontext():
            actual = train(model, begun.rate, callbacks, strategy=strategy, devices=["cpu", "cpu"])
        found["deviation"] = deviation(begun, expected, actual)
        found["cut"] = json.loads(notes.read_text())
        found["costs"] = costs.found
    except ConfigurationError as error:
        found["refused"] = str(error)
        found["traceback"] = traceback.format_exc()
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {error}"
        found["traceback"] = traceback.format_exc()
    found["seconds"] = time.monotonic() - start
    return found
