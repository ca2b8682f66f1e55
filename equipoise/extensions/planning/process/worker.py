"""The process of a prediction, from its request to its result.

The request comes from the process that has started this one, over a pipe that no other can write to.
"""

import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.planning.process.results import plain_curve
from equipoise.extensions.planning.tracing.obstacles import reason_of
from equipoise.extensions.planning.tracing.tracer import StepCurve, measure_step, trace_step
from equipoise.interop.torch.fake_tensors import fake_tensors

__all__ = ["predict", "write_result"]


def predict(result_file: Path, request: bytes) -> None:
    """Find the curve of a step, and write it as JSON; an error becomes its reason.

    Args:
        result_file: The file for the result.
        request: The pickled request.
    """
    # Nothing is computed for which threads would help.
    torch.set_num_threads(1)
    try:
        result = plain_curve(_answer(request))
    except Exception as error:
        result = {"reason": reason_of(error), "is_wrong_input": isinstance(error, ConfigurationError)}
    write_result(result_file, result)


def _answer(request: bytes) -> StepCurve:
    # 1. Real steps need a module with its weights.
    is_traced, content = pickle.loads(request)  # noqa: S301 - from the process that started this one
    if not is_traced:
        module, example, settings, build_optimizer = pickle.loads(content)  # noqa: S301
        return measure_step(lambda: module, example, settings, build_optimizer)

    # 2. The module of a trace is unpickled where its tensors get no memory. The example is needed before.
    with fake_tensors(_ignore):
        _, example, settings, build_optimizer = pickle.loads(content)  # noqa: S301
    return trace_step(partial(_module_of, content), example, settings, build_optimizer)


def _module_of(content: bytes) -> nn.Module:
    module: nn.Module = pickle.loads(content)[0]  # noqa: S301
    return module


def _ignore(sentence: str) -> None:
    """Do nothing."""


def write_result(result_file: Path, result: dict[str, Any]) -> None:
    """Write a result so that a file that is there is complete."""
    unfinished = result_file.with_suffix(".part")
    unfinished.write_text(json.dumps(result), encoding="utf-8")
    unfinished.rename(result_file)
