"""One pass over a loader without gradients, and its results over all processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from time import monotonic
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from equipoise.callbacks.evaluation.host import EvaluationHost
from equipoise.errors import StepError
from equipoise.interleave import interleave
from equipoise.interop.merged_metrics import join_metrics, states_to_send
from equipoise.memory.devices import PeakMeter
from equipoise.tree import entries_of

__all__ = ["EvaluationPass", "EvaluationResult", "without_graph"]

Forward = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Result of one evaluation, the same in all processes.

    Attributes:
        step: Number of optimiser steps before the evaluation.
        epoch: Number of epochs before the evaluation.
        values: Values of the metrics by name: numbers, and tensors on the CPU for several elements.
        memory: Peak memory of the evaluation in bytes, beyond the memory in use before; the maximum of all processes.
        seconds: Duration in seconds; the maximum of all processes.
        batches: Number of batches, of all processes together.
    """

    step: int
    epoch: int
    values: dict[str, Any]
    memory: int
    seconds: float
    batches: int

    def state_dict(self) -> dict[str, Any]:
        """Return the result as plain containers, numbers and tensors."""
        return asdict(self)


@dataclass(kw_only=True)
class EvaluationPass:
    """Evaluate a module on this process's share of a loader.

    Args:
        name: Name of the evaluation in errors.
        host: Trainer under which it runs.
        metrics: Metrics to compute, without any updates.
        forward: The user's function, or None.
        inference_mode: True for `torch.inference_mode`, False for `torch.no_grad`.
        limit: Number of batches for this process; None: all.
        collect: Collect the outputs.

    Attributes:
        outputs: Outputs of this process; after `finish` those of all processes, in the order of the data.
        batches: Number of batches of this process.
        memory: Peak memory in bytes beyond the memory in use before.
        seconds: Duration in seconds.
    """

    name: str
    host: EvaluationHost
    metrics: Metric | MetricCollection | None
    forward: Forward | None
    inference_mode: bool
    limit: int | None
    collect: bool
    outputs: list[Any] = field(default_factory=list, init=False)
    batches: int = field(default=0, init=False)
    memory: int = field(init=False)
    seconds: float = field(init=False)

    def run(self, module: nn.Module, loader: Any) -> None:
        """Evaluate every batch, once. A batch is freed on the device before the next one is read.

        Args:
            module: The module.
            loader: The loader of this process's batches.
        """
        start = monotonic()
        with ExitStack() as stack:
            # 1. Measure the memory of all devices.
            meters = [stack.enter_context(PeakMeter(device)) for device in self._devices_of(module)]
            # 2. Evaluate.
            batches = iter(loader)
            for batch in islice(batches, self.limit):
                output = self._evaluate(module, batch)
                if self.collect:
                    self.outputs.append(to_cpu(output))
                self.batches += 1
                del batch, output
            # This ends worker processes.
            del batches
        self.memory = sum(meter.extra for meter in meters)
        self.seconds = monotonic() - start

    def _devices_of(self, module: nn.Module) -> set[torch.device]:
        """Return the devices on which the evaluation uses memory."""
        devices = {parameter.device for parameter in module.parameters()}
        devices.add(self.host.device)
        return {device for device in devices if device.type != "meta"}

    def _evaluate(self, module: nn.Module, batch: Any) -> Any:
        """Return the output for a batch, with which the metrics are updated."""
        with without_graph(self.name, inference_mode=self.inference_mode):
            batch = self.host.transfer(batch)
            with self.host.forward_context():
                if self.forward is None:
                    output = self._default_forward(module, batch)
                else:
                    output = self.forward(module, batch)
                check_no_graph(output, self.name)
                if self.metrics is not None:
                    self._update(self.metrics, output)
        return output

    def _default_forward(self, module: nn.Module, batch: Any) -> Any:
        """Return the module's output for the inputs; with metrics, a pair of it and the target."""
        is_pair = isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2
        if is_pair:
            inputs, target = batch
            return module(inputs) if self.metrics is None else (module(inputs), target)
        # The batch may be the inputs alone.
        if self.metrics is None:
            return module(batch)
        length = ""
        if isinstance(batch, (Sequence, Mapping)):
            length = f" of {len(batch)}"
        raise StepError(
            f"{self.name}: a batch must be (inputs, target), but it is a {type(batch).__name__}{length}."
            " Give forward=..., a function of module and batch that returns (preds, target)."
        )

    def _update(self, metrics: Metric | MetricCollection, output: Any) -> None:
        if isinstance(output, Mapping):
            metrics.update(**output)
        elif isinstance(output, (tuple, list)):
            metrics.update(*output)
        else:
            raise StepError(
                f"{self.name}: forward must return what the metrics are updated with, (preds, target) or a mapping of"
                f" arguments by name, but it returned a {type(output).__name__}."
            )

    def finish(self, *, step: int, epoch: int) -> EvaluationResult:
        """Combine the results of all processes. Each process must call it.

        Raises:
            StepError: If no process had a batch.
        """
        # 1. Exchange counts and states of metrics.
        metric_states: list[Any] = []
        if self.metrics:
            metric_states = states_to_send(self.metrics)
        reports = self.host.gather((self.batches, self.memory, self.seconds, metric_states))
        batches, memory, seconds, metric_states_of_processes = zip(*reports, strict=True)
        if not any(batches):
            raise StepError(
                f"{self.name}: the loader gave no batch, so there is nothing to evaluate. Give one that does."
            )
        # 2. Compute the values.
        values = self._compute(list(metric_states_of_processes))
        # 3. Exchange values, which a process without batches lacks, and outputs.
        if self.host.world_size > 1:
            values = self._exchange(values)
        return EvaluationResult(
            step=step,
            epoch=epoch,
            values=values or {},
            memory=max(memory),
            seconds=max(seconds),
            batches=sum(batches),
        )

    def _compute(self, states_of_processes: list[Any]) -> dict[str, Any] | None:
        """Return the values of the metrics over all processes; None without metrics, or without batches here."""
        # A metric that was never updated may be unable to compute.
        if self.metrics is None or not self.batches:
            return None
        with torch.no_grad():
            join_metrics(self.metrics, states_of_processes)
            return plain_values(self.metrics, self.metrics.compute())

    def _exchange(self, values: dict[str, Any] | None) -> dict[str, Any] | None:
        """Collect the outputs of all processes, and return the values of the first process that has some."""
        pairs = self.host.gather((values, self.outputs))
        self.outputs = interleave(outputs for _, outputs in pairs)
        return next((values for values, _ in pairs if values is not None), None)


# Graphs


@contextmanager
def without_graph(name: str, *, inference_mode: bool) -> Iterator[None]:
    """Disable gradients, and raise as soon as an operation nevertheless saves a tensor for a backward.

    Args:
        name: Name of the evaluation in errors.
        inference_mode: True for `torch.inference_mode`, False for `torch.no_grad`.

    Raises:
        StepError: From within the operation.
    """

    def refuse(tensor: Tensor) -> Any:
        raise _graph_error(name, f"an operation saved a tensor of shape {list(tensor.shape)} for a backward")

    mode: torch.inference_mode | torch.no_grad
    if inference_mode:
        mode = torch.inference_mode()
    else:
        mode = torch.no_grad()
    # These hooks run for every tensor that a graph saves, so an operation without a graph never calls them.
    with mode, torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        yield


def check_no_graph(output: Any, name: str) -> None:
    """Check that no tensor of an output belongs to a graph.

    Raises:
        StepError: If one does. The message names the tensor.
    """
    for path, tensor in entries_of(output, "output"):
        if tensor.grad_fn is not None:
            function = type(tensor.grad_fn).__name__
            raise _graph_error(name, f"{path}, of shape {list(tensor.shape)}, has grad_fn={function}")


def _graph_error(name: str, sign: str) -> StepError:
    return StepError(
        f"{name} evaluates without gradients, but a graph was built: {sign}. Something in forward turns gradients on,"
        " by torch.enable_grad(), torch.set_grad_enabled(True) or torch.inference_mode(False). Take it out, or give"
        " forward=... that goes without it."
    )


# Values


def to_cpu(output: Any) -> Any:
    """Copy the tensors of a nested output to the CPU."""
    # Tensors of inference mode could not be used in training.
    with torch.inference_mode(False), torch.no_grad():
        return apply_to_collection(output, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))


def plain_values(metrics: Metric | MetricCollection, computed: Any) -> dict[str, Any]:
    """Return computed values by name: a number for one element, else a tensor on the CPU."""
    # A single metric returns its value without a name.
    if not isinstance(computed, Mapping):
        computed = {type(metrics).__name__: computed}
    values: dict[str, Any] = {}
    for name, value in computed.items():
        value = to_cpu(value)
        if not isinstance(value, Mapping):
            values[str(name)] = _plain(value)
            continue
        for key, item in value.items():
            path = f"{name}/{key}" if key else str(name)
            values[path] = _plain(item)
    return values


def _plain(value: Any) -> Any:
    """Return the number in a tensor of one element; other values as they are."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return value
