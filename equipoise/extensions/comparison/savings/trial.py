"""One trial: a few steps with a saver, in the process of the trial."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from equipoise.app.build import build_trainer
from equipoise.errors import ConfigurationError
from equipoise.extensions.comparison.bounded.process import run_in_process
from equipoise.extensions.comparison.bounded.worker import build_data_and_module, limit_to_steps
from equipoise.extensions.comparison.savings.probe import TIMED_STEPS, WARM_STEPS, Probe, digest_of
from equipoise.extensions.comparison.savings.savers import Trial
from equipoise.extensions.planning.description.repeated_blocks import repeated_blocks

__all__ = ["measure", "request_of", "run_trial"]


def run_trial(trial: Trial, folder: Path, paths: Sequence[str], timeout: float) -> dict[str, Any]:
    """Run a trial in a process of its own and return its result.

    Args:
        trial: The trial.
        folder: A new folder for its files.
        paths: Folders from which the process imports the user's modules.
        timeout: Seconds after which the process is ended.

    Returns:
        The measurements, or under "reason" why there are none.
    """
    return run_in_process(measure, request_of(trial, paths), folder, timeout)


def request_of(trial: Trial, paths: Sequence[str]) -> dict[str, Any]:
    """Return what the process needs to know.

    Args:
        trial: The trial.
        paths: Folders from which the process imports the user's modules.
    """
    return {
        "values": trial.values,
        "paths": list(paths),
        "chooses_blocks": trial.chooses_blocks,
        "needs_device": trial.needs_device,
    }


def measure(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build the objects, train, and return the measurements.

    Args:
        request: The trial, as `request_of` returns it.
        folder: Folder for files of the trial.
    """
    # 1. Data and module, the same in all trials.
    values = request["values"]
    data, module = build_data_and_module(values)

    # 2. The trainer, without loggers and callbacks of the user.
    overrides = []
    limit_to_steps(values, WARM_STEPS + 1 + TIMED_STEPS, folder)
    # The blocks are known once the module is built.
    if request["chooses_blocks"]:
        patterns = repeated_blocks(module)
        if not patterns:
            raise ConfigurationError(
                "No repeated blocks were found; name submodules by trainer.activation_checkpointing=[NAME]."
            )
        values["trainer"]["activation_checkpointing"] = patterns
        overrides.append(f"trainer.activation_checkpointing=[{','.join(patterns)}]")
    trainer = build_trainer(values)
    _check_device(trainer, needs_device=request["needs_device"])

    # 3. The steps.
    probe = Probe()
    trainer.callbacks.append(probe)
    trainer.fit(module, datamodule=data)
    if not probe.seconds:
        raise ConfigurationError("The training ended before the steps were measured: there are too few batches.")
    return {
        "device": str(probe.device),
        "peak": probe.peak,
        "seconds": median(probe.seconds),
        "losses": probe.losses,
        "digest": digest_of(module),
        "overrides": overrides,
    }


def _check_device(trainer: Any, *, needs_device: bool) -> None:
    """Check that a trial in one process measures something."""
    if trainer.world_size > 1:
        raise ConfigurationError(
            "equipoise savings measures one process; add strategy=single_device, and trainer.devices=1 if need be."
        )
    # The saver would move nothing.
    if needs_device and trainer.strategy.root_device.type == "cpu":
        raise ConfigurationError("it has no effect on a CPU, whose memory is that of the host")
