"""One trial in a process of its own: a few steps with a saver. `python -m equipoise.app.savings.trial FOLDER` runs it.

The folder contains the request, and receives the result, both as JSON.
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch import seed_everything

from equipoise.app.build import build, build_trainer
from equipoise.app.savings.blocks import repeated_blocks
from equipoise.app.savings.probe import TIMED_STEPS, WARM_STEPS, Probe, digest_of
from equipoise.errors import ConfigurationError

__all__ = ["REQUEST", "RESULT", "main"]

# Names of the files.
REQUEST = "request.json"
RESULT = "result.json"

# All that is no part of a training step is left out.
_TRAINER = {
    "max_steps": WARM_STEPS + 1 + TIMED_STEPS,
    "max_epochs": -1,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "fast_dev_run": False,
    "barebones": False,
    "profiler": None,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def main(folder: Path) -> None:
    """Run the trial of a folder, and write its result there; an error becomes its reason.

    Args:
        folder: The folder with the request.
    """
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    sys.path[:0] = request["paths"]
    try:
        result = _run(request, folder)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        is_wrong_input = isinstance(error, ConfigurationError)
        reason = first_line
        if not is_wrong_input:
            reason = f"{type(error).__name__}: {first_line}"
        result = {"reason": reason, "is_configuration": is_wrong_input}
    # A file that is there is complete.
    unfinished = folder / f"{RESULT}.part"
    unfinished.write_text(json.dumps(result), encoding="utf-8")
    unfinished.rename(folder / RESULT)


def _run(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build the objects, train, and return the measurements."""
    # 1. Data and module. Without a seed, two trials would begin with different weights.
    values = request["values"]
    seed = values["seed"]
    if seed is None:
        seed = 0
    seed_everything(seed, workers=True)
    data = None
    if values.get("data"):
        data = build(values["data"], "data")
    module = build(values["module"], "module")

    # 2. The trainer, without loggers and callbacks of the user.
    overrides = []
    values["trainer"] |= _TRAINER
    values["trainer"]["default_root_dir"] = str(folder)
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
    if needs_device and trainer.strategy.root_device.type == "cpu":
        raise ConfigurationError("it has no effect on a CPU, whose memory is that of the host")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
