"""One pass over a loader without gradients, and its results over all processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from time import monotonic
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from equipoise.callbacks.evaluation.host import EvaluationHost
from equipoise.errors import StepError
from equipoise.interleave import interleave
from equipoise.interop.metrics import join_metrics, states_to_send
from equipoise.memory.devices import PeakMeter
from equipoise.parallel.batches.splitting import entries_of

__all__ = ["EvaluationPass", "EvaluationResult", "without_graph"]

Forward = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What one evaluation came to, the same in all processes.

    Attributes:
        step: The number of optimiser steps that the module had taken.
        epoch: The number of epochs it had done.
        values: What the metrics computed, by name: numbers, and tensors on the CPU where there are several.
        memory: Bytes that the evaluation held at its peak beyond what was held before; the most of any process.
        seconds: How long it took; the most of any process.
        batches: The number of batches, of all processes together.
    """

    step: int
    epoch: int
    values: dict[str, Any]
    memory: int
    seconds: float
    batches: int

    def state_dict(self) -> dict[str, Any]:
        """Plain containers, numbers and tensors."""
        return asdict(self)


@dataclass(kw_only=True)
class EvaluationPass:
    """Evaluates a module on this process's part of a loader.

    Args:
        name: What errors call it.
        around: Where it runs.
        metrics: What is computed; as new.
        forward: The user's, if there is one.
        inference_mode: Whether under `torch.inference_mode`.
        limit: The number of batches for this process; None: all.
        collect: Whether outputs are kept.

    Attributes:
        outputs: Those of this process; after `finish` of all, in the order of the data.
    """

    name: str
    around: EvaluationHost
    metrics: Metric | MetricCollection | None
    forward: Forward | None
    inference_mode: bool
    limit: int | None
    collect: bool

    def run(self, module: nn.Module, part: Any) -> None:
        """Evaluates every batch; nothing of one is left on the device when the next one is read."""
        self.outputs: list[Any] = []
        self.batches, started = 0, monotonic()
        devices = {tensor.device for tensor in module.parameters()} | {self.around.device}
        with ExitStack() as stack:
            meters = [stack.enter_context(PeakMeter(device)) for device in devices if device.type != "meta"]
            batches = iter(part)
            for batch in islice(batches, self.limit):
                output = self._evaluate(module, batch)
                if self.collect:
                    self.outputs.append(to_cpu(output))
                self.batches += 1
                del batch, output
            del batches  # ends worker processes
        self.memory, self.seconds = sum(meter.extra for meter in meters), monotonic() - started

    def _evaluate(self, module: nn.Module, batch: Any) -> Any:
        with without_graph(self.name, inference_mode=self.inference_mode):
            batch = self.around.transfer(batch)
            with self.around.forward_context():
                output = self._default(module, batch) if self.forward is None else self.forward(module, batch)
                check_no_graph(output, self.name)
                if self.metrics is not None:
                    self._update(self.metrics, output)
        return output

    def _default(self, module: nn.Module, batch: Any) -> Any:
        pair = isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2
        if self.metrics is None:
            return module(batch[0] if pair else batch)
        if not pair:
            raise StepError(
                f"{self.name}: a batch must be (inputs, target), but it is a {type(batch).__name__}"
                f"{f' of {len(batch)}' if isinstance(batch, (Sequence, Mapping)) else ''}."
                " Give forward=..., a function of module and batch that returns (preds, target)."
            )
        return module(batch[0]), batch[1]

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
        """Puts together what all processes have; each must call it.

        Args:
            step: The number of optimiser steps.
            epoch: The number of epochs.
        """
        gather = self.around.gather
        told = gather((self.batches, self.memory, self.seconds, states_to_send(self.metrics) if self.metrics else []))
        batches = sum(each[0] for each in told)
        if not batches:
            raise StepError(
                f"{self.name}: the loader gave no batch, so there is nothing to evaluate. Give one that does."
            )
        values: dict[str, Any] | None = None
        if self.metrics is not None and self.batches:  # one that was never updated may not know how to compute
            with torch.no_grad():
                join_metrics(self.metrics, [each[3] for each in told])
                values = plain_values(self.metrics, self.metrics.compute())
        if self.around.world_size > 1:
            together = gather((values, self.outputs))
            values = next((each for each, _ in together if each is not None), None)
            self.outputs = interleave(outputs for _, outputs in together)
        return EvaluationResult(
            step=step,
            epoch=epoch,
            values=values or {},
            memory=max(each[1] for each in told),
            seconds=max(each[2] for each in told),
            batches=batches,
        )


# Graphs


@contextmanager
def without_graph(name: str, *, inference_mode: bool) -> Iterator[None]:
    """No gradients, and an error as soon as an operation saves something for a backward nevertheless.

    Args:
        name: What the error calls the evaluation.
        inference_mode: Whether `torch.inference_mode` is meant, or `torch.no_grad`.

    Raises:
        StepError: Out of the operation.
    """

    def refuse(tensor: Tensor) -> Any:
        raise _built(name, f"an operation saved a tensor of shape {list(tensor.shape)} for a backward")

    mode = torch.inference_mode() if inference_mode else torch.no_grad()
    with mode, torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        yield


def check_no_graph(output: Any, name: str) -> None:
    """Checks that no tensor of an output hangs on a graph.

    Raises:
        StepError: Naming the tensor.
    """
    for path, tensor in entries_of(output, "output"):
        if tensor.grad_fn is not None:
            raise _built(name, f"{path}, of shape {list(tensor.shape)}, has grad_fn={type(tensor.grad_fn).__name__}")


def _built(name: str, what: str) -> StepError:
    return StepError(
        f"{name} evaluates without gradients, but a graph was built: {what}. Something in forward turns gradients on,"
        " by torch.enable_grad(), torch.set_grad_enabled(True) or torch.inference_mode(False). Take it out, or give"
        " forward=... that goes without it."
    )


# Values


def to_cpu(output: Any) -> Any:
    """Copies of the tensors of a nested output, on the CPU, which ordinary code may use: none of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return apply_to_collection(output, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))


def plain_values(metrics: Metric | MetricCollection, computed: Any) -> dict[str, Any]:
    """What metrics computed, by name: numbers where there is one, else tensors on the CPU."""
    if not isinstance(computed, Mapping):
        computed = {type(metrics).__name__: computed}
    values: dict[str, Any] = {}
    for name, value in computed.items():
        value = to_cpu(value)
        for path, tensor in [("", value)] if not isinstance(value, Mapping) else value.items():
            single = isinstance(tensor, Tensor) and tensor.numel() == 1
            values[f"{name}/{path}" if path else str(name)] = tensor.item() if single else tensor
    return values
