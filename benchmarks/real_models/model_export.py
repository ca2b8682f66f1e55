"""Trains a model by torch.export in the place of the pipeline's recorder, and in the pipeline as it is."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from catalogue import Model
from main import MOST, MOST_IN_SINGLE_PRECISION
from torch import Tensor
from torch_export import ExportedForward, changing_dims, first_line
from torch_export_halves import cut_in_two, module_of
from training import Task, batches_of, begin, deviation, double_precision, prepared, train

from equipoise import Callback, ConfigurationError, PipelineStrategy
from equipoise.extensions.pipeline.checked_traces import CheckedTraces, NotFollowed
from equipoise.extensions.pipeline.graph.call_structure import CallStructure
from equipoise.extensions.pipeline.network import StagedNetwork
from equipoise.parallel.batches.shares import even_sizes
from equipoise.parallel.batches.splitting import Splitter

__all__ = ["judge"]

Write = Callable[..., None]


def judge(model: Model, write: Write) -> None:
    """Trains a model by its own forward, by torch.export and in a pipeline; writes what became of it, part by part."""
    begun, single = begin(model)
    write(parameters=sum(parameter.numel() for parameter in begun.parameters()), single_precision=single)
    expected = _trained(model, begun.rate, 1)
    most = MOST_IN_SINGLE_PRECISION if single else MOST
    is_equal = _judge_export(model, begun, expected, most, write)
    # A loader draws a number, after which models that drop values at random drop others.
    expected = train(model, begun.rate, strategy="single_device", devices=1)
    write(pipeline=_pipelined(model, begun, expected, may_record=True))
    if not is_equal:
        write(stack=_pipelined(model, begun, expected, may_record=False))


def _judge_export(model: Model, begun: Task, expected: Task, most: float, write: Write) -> bool:
    """Trains by torch.export; returns whether that ends with the same weights."""
    task = prepared(model)
    with double_precision():
        calls = _calls_of(model, task)
        forward = _exported(task, calls, write)
        if forward is None:
            return False
        write(**_described(forward, calls))
    deviations: dict[str, float] = {}
    for name, micro_batches in (("whole", 1), ("micro-batches", 2)):
        actual = _trained(model, begun.rate, micro_batches, dims=forward.dims)
        deviations[name] = deviation(begun, expected, actual)
        write(deviations=deviations)
    if max(deviations.values()) <= most:
        return True
    # The forward itself may deviate as far in micro-batches.
    by_forward = _trained(model, begun.rate, 2)
    by_both = deviation(begun, by_forward, actual)
    write(micro_batches_by_forward=deviation(begun, expected, by_forward), micro_batches_by_both=by_both)
    return max(deviations["whole"], by_both) <= most


def _exported(task: Task, calls: Sequence[CallStructure], write: Write) -> ExportedForward | None:
    """The forward for batches of any size, or else for one size each; None if both are refused."""
    changing = changing_dims(calls[0], calls[-1])
    for dims in (lambda structure: changing, None):
        forward = ExportedForward(task.net, dims)
        start = time.monotonic()
        try:
            forward.graph_of(calls[0])
        except Exception as error:
            write(**{"refused" if dims is None else "refused for any size": first_line(error)})
            write(seconds_refused=time.monotonic() - start)
        else:
            return forward
    return None


def _described(forward: ExportedForward, calls: Sequence[CallStructure]) -> dict[str, Any]:
    """Describe a graph: its outputs beside the forward's in the first batch and the last, its calls, its cut."""
    graph = forward.graph_of(calls[0])
    return {
        "any_size": forward.dims is not None,
        "seconds": graph.seconds,
        "processor_seconds": graph.processor_seconds,
        "outputs": [forward.difference(structure) for structure in (calls[0], calls[-1])],
        "calls": len(graph.calls),
        "calls_in_modules": sum(bool(module_of(call)) for call in graph.calls),
        "cut": cut_in_two(graph, calls[0].tensors),
    }


def _calls_of(model: Model, task: Task) -> list[CallStructure]:
    """The call of the network in each batch."""
    calls: list[CallStructure] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(CallStructure(args, kwargs))
        raise _Called

    with mock.patch.object(task.net, "forward", forward):
        for batch in batches_of(model):
            with suppress(_Called):
                task.training_step(batch, 0)
    return calls


class _Called(Exception):
    """Raised where a step calls the network."""


def _trained(model: Model, rate: float, micro_batches: int, dims: Any = "eager") -> Task:
    """Trains a new copy of a model; by torch.export if `dims` are given, which may be None."""
    task = prepared(model)
    task.rate = rate
    optimizer = task.configure_optimizers()
    splitter = Splitter(task)
    forward = ExportedForward(task.net, None if dims == "eager" else dims)
    with double_precision(), forward.replacing(dims != "eager"):
        if dims not in ("eager", None):
            forward.graph_of(_calls_of(model, task)[0])  # an example of one sample would fix the size
        for batch in batches_of(model):
            optimizer.zero_grad()
            size = splitter.size(batch)
            assert size is not None
            parts = [batch]
            if micro_batches > 1:
                parts = splitter.parts(batch, even_sizes(size, micro_batches))
            _loss(task, splitter, parts).backward()
            optimizer.step()
    return task


def _loss(task: Task, splitter: Splitter, parts: Sequence[Any]) -> Tensor:
    """The loss of a batch, from those of its micro-batches."""
    losses, weights = [], []
    for part in parts:
        result = task.training_step(part, 0)
        if isinstance(result, Tensor):
            result = {"loss": result, "loss_weight": splitter.size(part)}
        losses.append(result["loss"])
        weights.append(float(result["loss_weight"]))
    weighted = [loss * weight for loss, weight in zip(losses, weights, strict=True)]
    return torch.stack(weighted).sum() / sum(weights)


class _Notes(Callback):
    """Notes how a pipeline follows the forward, and when its first step ends.

    Attributes:
        followed_by: "recording" or "stack"; empty before the first batch.
        first_step: Seconds of the processor from the beginning of the fit to the end of the first step.
    """

    followed_by = ""
    first_step = 0.0

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._start = time.process_time()

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        if not self.followed_by:
            self.first_step = time.process_time() - self._start
            self.followed_by = "recording" if trainer.strategy._run.network._stacked is None else "stack"


def _pipelined(model: Model, begun: Task, expected: Task, may_record: bool) -> dict[str, Any]:
    """Trains in a pipeline as it is today; or by its stack alone, without a recorder."""
    notes, found = _Notes(), {}
    strategy = PipelineStrategy(micro_batches=2)
    with _times_noted() as seconds, _recorder(may_record):
        try:
            actual = train(model, begun.rate, [notes], strategy=strategy, devices=["cpu", "cpu"])
            found["deviation"] = deviation(begun, expected, actual)
        except Exception as error:
            kind = "refused" if isinstance(error, ConfigurationError) else "failed"
            found[kind] = str(error).partition("\n")[0]
    found |= {"followed_by": notes.followed_by, "first_step": notes.first_step}
    return {
        **found,
        "recordings": [each for each, _ in seconds],
        "recorded_by_processor": [each for _, each in seconds],
    }


@contextmanager
def _times_noted() -> Iterator[list[tuple[float, float]]]:
    """Notes within the context the seconds of each recording, with its comparison, and those of the processor."""
    seconds: list[tuple[float, float]] = []
    checked = CheckedTraces.checked

    def noted(traces: CheckedTraces, name: str, structure: CallStructure) -> Any:
        if traces.find(name, structure) is not None:
            return checked(traces, name, structure)
        start, start_of_processor = time.monotonic(), time.process_time()
        try:
            return checked(traces, name, structure)
        finally:
            seconds.append((time.monotonic() - start, time.process_time() - start_of_processor))

    with mock.patch.object(CheckedTraces, "checked", noted):
        yield seconds


@contextmanager
def _recorder(may_record: bool) -> Iterator[None]:
    """Lets pipelines follow a forward by their stack alone, unless they may record it."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotFollowed("without a recorder", "there is no recorder")

    if may_record:
        yield
        return
    with mock.patch.object(StagedNetwork, "_recorded_cut", refuse):
        yield
