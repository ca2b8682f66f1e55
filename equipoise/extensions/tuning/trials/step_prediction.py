"""The predicted memory of a trainer's step on its devices."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.planned_devices import PlannedDevice, describe_devices
from equipoise.extensions.planning.peaks.memory_prediction import MemoryPrediction
from equipoise.extensions.planning.prediction import predict_memory
from equipoise.parallel.workers.bounded_call import CallError, call_bounded

__all__ = ["describe_elsewhere", "devices_of", "predict_step"]

# Time to import torch, and to create a context on each device.
_SECONDS = 60.0


def predict_step(trainer: Any, module: LightningModule, batch: Any, *, measure: bool) -> MemoryPrediction:
    """Return the predicted memory of a training step on one device.

    Args:
        trainer: The trainer.
        module: The user's module.
        batch: A batch.
        measure: True to run real steps where a step cannot be traced.

    Raises:
        ConfigurationError: If the step cannot be predicted.
    """
    return predict_memory(
        module,
        batch,
        precision=trainer.precision,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        activation_checkpointing=trainer.run_state.activation_checkpointing or (),
        callbacks=trainer.callbacks,
        device=trainer.connected_strategy.root_device.type,
        measure=measure,
    )


def devices_of(trainer: Any) -> list[PlannedDevice]:
    """Return the devices of a trainer as a plan describes them.

    Raises:
        ConfigurationError: If they cannot be read.
    """
    strategy = trainer.connected_strategy
    devices = list(strategy.processes.devices or strategy.devices)
    # Workers on the CPU share its memory.
    if all(device.type == "cpu" for device in devices):
        return describe_devices(f"{len(devices)}xcpu")
    return describe_elsewhere([str(device) for device in devices])


def describe_elsewhere(names: Sequence[str]) -> list[PlannedDevice]:
    """Return the devices as a process sees them that ends before the training begins.

    Reading the free memory of a GPU takes several hundred MiB there for the context of the process that reads.

    Args:
        names: Names of devices of this machine, such as "cuda:1".

    Raises:
        ConfigurationError: If they cannot be read.
    """
    try:
        devices: list[PlannedDevice] = call_bounded(describe_devices, names, timeout=_SECONDS)
    except CallError as error:
        raise ConfigurationError(f"the memory of {', '.join(names)} cannot be read: {error}") from error
    return devices
