"""One trial: a few steps with a saver, in the process of the trial."""

from pathlib import Path
from statistics import median
from typing import Any

from equipoise.app.build import build_trainer
from equipoise.errors import ConfigurationError
from equipoise.extensions.common.bench import build_data_and_module, limit_to_steps
from equipoise.extensions.comparison.savings.probe import STEPS, SaverProbe, digest_of
from equipoise.extensions.comparison.savings.savers import Trial
from equipoise.extensions.planning.description.layers import repeated_blocks

__all__ = ["measure"]


def measure(trial: Trial, folder: Path) -> dict[str, Any]:
    """Build the objects, train, and return the measurements."""
    # 1. Data and module, the same in all trials.
    values = trial.values
    data, module = build_data_and_module(values)

    # 2. The trainer, without loggers and callbacks of the user.
    overrides = []
    limit_to_steps(values, STEPS, folder)
    # The blocks are known once the module is built.
    if trial.chooses_blocks:
        patterns = repeated_blocks(module)
        if not patterns:
            raise ConfigurationError(
                "No repeated blocks were found; name submodules by trainer.activation_checkpointing=[NAME]."
            )
        values["trainer"]["activation_checkpointing"] = patterns
        overrides.append(f"trainer.activation_checkpointing=[{','.join(patterns)}]")
    trainer = build_trainer(values)
    _check_device(trainer, needs_device=trial.needs_device)

    # 3. The steps.
    device = trainer.strategy.root_device
    probe = SaverProbe(folder, device)
    trainer.callbacks.append(probe)
    trainer.fit(module, datamodule=data)
    if not probe.seconds_of_steps:
        raise ConfigurationError("The training ended before the steps were measured: there are too few batches.")
    return {
        "device": str(device),
        "peak": sum(probe.peaks.values()),
        "seconds": median(probe.seconds_of_steps),
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
