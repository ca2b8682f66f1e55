"""Trains small networks, each with one property, by torch.export and in a pipeline, and compares both with one device.

python benchmarks/real_models/exported_properties.py             all properties, a minute
python benchmarks/real_models/exported_properties.py --only dropout
"""

import argparse
import io
import logging
import random
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import libraries  # noqa: F401 completes torchvision before Lightning is imported
import lightning as L
from property_networks import PROPERTIES, Property
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim
from torch.utils.data import DataLoader
from torch_export import ExportedForward, first_line
from torch_export_comparison import compare
from training import QUIET

from equipoise import Callback, PipelineStrategy, Trainer
from equipoise.extensions.pipeline.graph.call_structure import CallStructure
from equipoise.extensions.pipeline.graph.training_modes import modes_of


@dataclass
class Outcome:
    """Values and the error that a training has left.

    Attributes:
        found: Values by what they are: weights, buffers, logged values, generators and so on.
        error: The error that has ended it; empty if none has.
        note: How the forward was followed.
    """

    found: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    note: str = ""


class _Steps(Callback):
    """Changes the task between steps as its property wants, and notes arguments after each step."""

    def __init__(self, chosen: Property) -> None:
        self._property = chosen
        self.arguments: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._property.between(batch_idx, module)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.arguments += [value.clone() for value in batch if isinstance(value, Tensor)]


class _Exports(Callback):
    """Puts torch.export in the place of the network's forward.

    Args:
        chosen: The property.
        has_conditions: Whether a call in other modes, with other attributes or parameters, is followed anew.
        is_compared: Whether each graph is compared with the forward.

    Attributes:
        forward: What stands in its place; None before the fit.
    """

    def __init__(self, chosen: Property, has_conditions: bool, is_compared: bool) -> None:
        self.forward: ExportedForward | None = None
        self._property = chosen
        self._conditions = _conditions if has_conditions else None
        self._compare = compare if is_compared else None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.forward = ExportedForward(module.network, self._changing, self._conditions, self._compare)
        module.network.forward = self.forward

    def _changing(self, structure: CallStructure) -> Any:
        """The first dimension of each tensor; where lengths change, the second one of the first tensor as well."""
        dims = [{0: Dim.DYNAMIC} if tensor.ndim else {} for tensor in structure.tensors]
        if self._property.length(0) != self._property.length(1):
            dims[0][1] = Dim.DYNAMIC
        return tuple(dims)


def _conditions(network: nn.Module, structure: CallStructure) -> tuple[Any, ...]:
    """Return what a pipeline can compare before it takes a graph: all that is visible from outside."""
    plain = []
    for module in network.modules():
        values = vars(module).items()
        plain.append([(name, value) for name, value in values if isinstance(value, bool | int | float | str)])
    tensors = [*network.parameters(), *network.buffers()]
    return (
        structure.key,
        repr(plain),
        tuple(modes_of(network)),
        tuple((id(tensor), tensor.requires_grad) for tensor in tensors),
        tuple((tensor.dtype, tensor.requires_grad) for tensor in structure.tensors),
    )


class _Pipelined(Callback):
    """Notes how the pipeline follows the forward."""

    note = ""

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        network = trainer.strategy._run.network
        if network._stacked is not None:
            self.note = "stack"
            return
        traces = [trace for compared in network._traces._compared.values() for trace in compared]
        whole = sorted({name for trace in traces for name in trace.opaque})
        self.note = f"recorded {len(traces)}" + (f", {', '.join(whole)} whole" if whole else "")


def trained(chosen: Property, way: str) -> Outcome:
    """Trains a network.

    Args:
        chosen: Its property.
        way: "one device" or one of `WAYS`.
    """
    L.seed_everything(7, verbose=False)
    task = chosen.task()
    steps, pipelined = _Steps(chosen), _Pipelined()
    exports = _Exports(chosen, way != "export", way == "and compared")
    callbacks: list[Callback] = [steps]
    options: dict[str, Any] = {"strategy": "single_device", "devices": 1}
    if way == "pipeline":
        callbacks.append(pipelined)
        options = {"strategy": PipelineStrategy(micro_batches=1), "devices": ["cpu", "cpu"]}
    elif way != "one device":
        callbacks.append(exports)
    outcome = Outcome()
    printed = io.StringIO()
    trainer = Trainer(**QUIET, callbacks=callbacks, **options)
    loader = DataLoader(chosen.batches(), batch_size=None, collate_fn=_same)
    try:
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            trainer.fit(task, loader)
    except Exception as error:
        outcome.error = _described(error)
    if exports.forward is not None:
        outcome.note = f"exported {len(exports.forward.graphs)}"
    outcome.note = pipelined.note or outcome.note
    outcome.found = {
        "weights": dict(task.named_parameters()),
        "buffers": dict(task.named_buffers()),
        "logged": dict(trainer.callback_metrics),
        "arguments": steps.arguments,
        "printed lines": len(printed.getvalue().splitlines()),
        "generators": [torch.get_rng_state(), random.getstate()],
        "state": chosen.look(task),
    }
    return outcome


def _same(batch: Any) -> Any:
    return batch


def _described(error: Exception) -> str:
    """The first line of an error, and whether it shows the line of a forward."""
    frames = traceback.extract_tb(error.__traceback__)
    in_forward = [frame for frame in frames if frame.filename.endswith("property_networks.py")]
    shows_line = any(frame.name != "training_step" for frame in in_forward) or ".forward, line " in str(error)
    return first_line(error)[:160] + ("" if shows_line else " (without the user's line)")


def difference(expected: Outcome, actual: Outcome, most: float) -> str:
    """Describe what differs; empty if nothing does."""
    if actual.error != expected.error:
        return actual.error or "no error"
    parts = []
    for name, value in expected.found.items():
        distance = _distance(value, actual.found[name])
        if not distance <= most:
            parts.append(f"{name} ({distance:.0e})" if distance < float("inf") else name)
    return ", ".join(parts)


def _distance(expected: Any, actual: Any) -> float:
    """The largest difference of numbers, as a share of the largest; infinite where there is no comparison."""
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        if isinstance(actual, FakeTensor) or expected.shape != actual.shape or expected.dtype != actual.dtype:
            return float("inf")
        if not expected.is_floating_point():
            return 0.0 if torch.equal(expected, actual) else float("inf")
        if not expected.numel():
            return 0.0
        one, other = expected.detach(), actual.detach()
        return float((one - other).abs().max() / one.abs().max().clamp(min=1e-300))
    if isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        return max((_distance(expected[key], actual[key]) for key in expected), default=0.0)
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        return max((_distance(one, other) for one, other in zip(expected, actual, strict=True)), default=0.0)
    return 0.0 if expected == actual else float("inf")


WAYS = ("export", "with conditions", "and compared", "pipeline")
"""Export alone; with the conditions of the pipeline; each graph also compared with the forward; a pipeline as it is."""


def row(chosen: Property) -> list[str]:
    """The line of a property."""
    expected = trained(chosen, "one device")
    cells = [chosen.name]
    for way in WAYS:
        actual = trained(chosen, way)
        different = difference(expected, actual, chosen.most)
        cells.append(f"differs: {different}" if different and not actual.error else different or "equal")
        cells[-1] += f" ({actual.note})" if actual.note else ""
    return cells


def main(command: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PART", help="properties whose names contain one of these")
    options = parser.parse_args(command)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "equipoise", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}\n")
    print(f"| property | {' | '.join(WAYS)} |\n{'| --- ' * (1 + len(WAYS))}|")
    for chosen in PROPERTIES:
        if not options.only or any(part in chosen.name for part in options.only):
            print(f"| {' | '.join(row(chosen))} |", flush=True)


if __name__ == "__main__":
    main()
