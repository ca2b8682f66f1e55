"""The step of a configuration: its batch, its settings, and its predicted memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from equipoise.app.build import build
from equipoise.errors import ConfigurationError
from equipoise.extensions.common.device_loads import PlannedPart
from equipoise.extensions.common.planned_devices import PlannedDevice
from equipoise.extensions.planning.description.settings import StepSettings, planned_callbacks
from equipoise.extensions.planning.peaks.memory_prediction import MemoryPrediction
from equipoise.extensions.planning.prediction import check_real_steps
from equipoise.extensions.planning.tracing.obstacles import reason_of
from equipoise.extensions.planning.tracing.planned_batches import PlannedBatches, planned_batches
from equipoise.extensions.planning.tracing.tracer import measure_step, trace_step

__all__ = ["batches_of", "predict_configured", "settings_of"]


def batches_of(values: Mapping[str, Any]) -> PlannedBatches:
    """Return the batches of the training loader for which a step is planned.

    Raises:
        ConfigurationError: If there are no data, or the loader is empty.
    """
    if not values.get("data"):
        raise ConfigurationError("A prediction reads one batch of the data; choose them by data=NAME.")
    data = build(values["data"], "data")
    data.prepare_data()
    data.setup("fit")
    return planned_batches(data.train_dataloader())


def settings_of(values: Mapping[str, Any], devices: Sequence[PlannedDevice]) -> StepSettings:
    """Return the settings of a step."""
    trainer = values["trainer"]
    kinds = [device.kind for device in devices]
    device: Literal["cpu", "cuda"] = "cpu"
    if "cuda" in kinds:
        device = "cuda"
    batches = trainer.get("accumulate_grad_batches") or 1
    if isinstance(batches, Mapping):
        batches = max(batches.values(), default=1)
    precision = trainer.get("precision") or "32-true"
    return StepSettings(
        precision=precision,
        accumulate_grad_batches=batches,
        activation_checkpointing=tuple(trainer.get("activation_checkpointing") or ()),
        device=device,
        callbacks=planned_callbacks(precision, _callbacks_of(values)),
    )


def _callbacks_of(values: Mapping[str, Any]) -> list[Any]:
    nodes = values.get("callbacks") or {}
    return [build(node, f"callbacks.{name}") for name, node in nodes.items() if node]


def predict_configured(
    values: Mapping[str, Any], example: Any, settings: StepSettings
) -> tuple[MemoryPrediction, nn.Module]:
    """Return the prediction of a step, and the module that was traced.

    A step that cannot be traced runs with parts of the batch, if the module is small.

    Raises:
        ConfigurationError: If the step can neither be traced nor run.
    """
    modules: list[nn.Module] = []

    def build_module() -> nn.Module:
        module: nn.Module = build(values["module"], "module")
        modules.append(module)
        return module

    try:
        prediction = trace_step(build_module, example, settings)
    except ConfigurationError:
        raise
    except Exception as error:
        # Without a module, there is nothing to run.
        if not modules:
            raise
        reason = reason_of(error)
        check_real_steps(modules[0], reason)
        modules.clear()
        measured = measure_step(build_module, example, settings)
        prediction = replace(measured, notes=[f"{reason}, so real steps were run."])
        return prediction, modules[0]

    def of_part(part: Callable[[nn.Module], PlannedPart]) -> MemoryPrediction:
        try:
            return trace_step(build_module, example, replace(settings, part=part))
        except Exception as error:
            raise ConfigurationError(reason_of(error)) from error

    return replace(prediction, of_part=of_part), modules[0]
