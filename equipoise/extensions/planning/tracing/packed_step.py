"""A step packed for the process that predicts its memory: for a trace without the contents of its tensors.

The process reads it from a file that no other user can write to.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.device_loads import PlannedPart
from equipoise.extensions.common.interop import FakeTensors
from equipoise.extensions.planning.peaks.memory_prediction import MemoryPrediction
from equipoise.extensions.planning.tracing.stand_in import ignore
from equipoise.extensions.planning.tracing.tracer import measure_step, trace_step
from equipoise.parallel.payload.object_pickling import Pickler
from equipoise.parallel.payload.unpicklable_parts import explain

__all__ = ["measure_packed", "packed", "trace_packed"]


class _EmptyPickler(Pickler):
    """Pickles the shapes of tensors in their place."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce tensors to their shapes, and everything else as usual."""
        if isinstance(value, Tensor) and value.layout is torch.strided:
            make = _empty
            if isinstance(value, nn.Parameter):
                make = _empty_parameter
            return make, (tuple(value.shape), value.stride(), value.dtype, value.requires_grad)
        return super().reducer_override(value)


def packed(value: Any, *, with_contents: bool) -> bytes:
    """Return a pickled object.

    Args:
        value: The object, with tensors in it.
        with_contents: True to send what is in the tensors, too.

    Raises:
        ConfigurationError: If a part of it cannot be pickled, naming it.
    """
    file = io.BytesIO()
    pickler = Pickler(file, None)
    if not with_contents:
        pickler = _EmptyPickler(file, None)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError, RecursionError) as error:
        raise ConfigurationError(explain(value, error)) from error
    return file.getvalue()


def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype).requires_grad_(requires_grad)


def _empty_parameter(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
) -> nn.Parameter:
    return nn.Parameter(torch.empty_strided(shape, stride, dtype=dtype), requires_grad=requires_grad)


# In the process.


def trace_packed(
    content: bytes,
    part: Callable[[nn.Module], PlannedPart] | None = None,
    samples: int | None = None,
) -> MemoryPrediction:
    """Return the traced memory of a step, which another process receives.

    Args:
        content: Module, example, settings and the function that builds the optimiser, pickled without contents.
        part: Makes the part of each sample that is computed. Default: None, whole samples.
        samples: Samples of the step. Default: those of the example.
    """
    # Nothing is computed for which threads would help.
    torch.set_num_threads(1)
    # The module is unpickled where its tensors get no memory. The example is needed before.
    with FakeTensors(ignore).active():
        _, example, settings, build_optimizer = pickle.loads(content)  # noqa: S301
    settings = replace(settings, part=part)
    return replace(trace_step(partial(_module_of, content), example, settings, build_optimizer, samples), trace=None)


def measure_packed(content: bytes) -> MemoryPrediction:
    """Return the memory of real steps.

    Args:
        content: The same as for `trace_packed`, with the contents of all tensors.
    """
    torch.set_num_threads(1)
    module, example, settings, build_optimizer = pickle.loads(content)  # noqa: S301
    return measure_step(lambda: module, example, settings, build_optimizer)


def _module_of(content: bytes) -> nn.Module:
    module: nn.Module = pickle.loads(content)[0]  # noqa: S301
    return module
