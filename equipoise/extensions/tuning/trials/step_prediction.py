"""The predicted memory of a trainer's step on its devices."""

from typing import Any

from lightning.pytorch import LightningModule

from equipoise.extensions.planning.description.devices import PlannedDevice, describe_devices
from equipoise.extensions.planning.prediction import MemoryPrediction, predict_memory
from equipoise.extensions.planning.process.devices import describe_devices_elsewhere

__all__ = ["devices_of", "predict_step"]


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
        device=trainer.connected_strategy.root_device.type,
        measure=measure,
    )


def devices_of(trainer: Any) -> list[PlannedDevice]:
    """Return the devices of a trainer as a plan describes them.

    Args:
        trainer: The trainer.
    """
    strategy = trainer.connected_strategy
    devices = list(strategy.processes.devices or strategy.devices)
    # Workers on the CPU share its memory.
    if all(device.type == "cpu" for device in devices):
        return describe_devices(f"{len(devices)}xcpu")
    # A context of this process on each of them would stay for the whole fit.
    return describe_devices_elsewhere([str(device) for device in devices])
