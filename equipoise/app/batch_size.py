"""`data.batch_size=auto`: the largest batch size that fits and leaves an epoch some steps, searched before the fit."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder

from equipoise.errors import ConfigurationError
from equipoise.parallel.workers.availability import require_workers

__all__ = ["check_has_number", "with_batch_size"]

_AUTO = "auto"
# Size of the first batches, of which the memory of all others is predicted.
_FIRST = 2
# Steps that an epoch keeps. All samples in one batch may fit, but an epoch of one step trains next to nothing.
_LEAST_STEPS = 10


def with_batch_size(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Callback]]:
    """Return the configuration with a number for `data.batch_size`, and the callback that searches it.

    Args:
        values: The whole configuration. Where `data.batch_size` is not "auto", it is returned as it is, without a
            callback.

    Raises:
        ConfigurationError: If the size is "auto" in anything but a new fit, or where no processes can be started.
    """
    data = values.get("data")
    if not isinstance(data, dict) or data.get("batch_size") != _AUTO:
        return dict(values), []
    if values["stage"] != "fit":
        raise ConfigurationError(
            f"data.batch_size=auto searches for a fit, not for {values['stage']}. Give a number, which may be larger"
            " than that of the fit."
        )
    # "last" may find no earlier run; with one, the batches of the first run continue.
    if values["ckpt_path"] is not None:
        raise ConfigurationError(
            "data.batch_size=auto searches for a new fit, but ckpt_path resumes from a checkpoint. Give the number that"
            " the first run has printed."
        )
    require_workers("data.batch_size=auto", "Give a number")
    numbered = {**values, "data": {**data, "batch_size": _FIRST}}
    finder = BatchSizeFinder(mode="binsearch", init_val=_FIRST)
    finder.least_steps = _LEAST_STEPS  # type: ignore[attr-defined]
    return numbered, [finder]


def check_has_number(values: Mapping[str, Any], command: str) -> None:
    """Refuse "auto" as the size of a command that searches none.

    Raises:
        ConfigurationError: If `data.batch_size` is "auto".
    """
    data = values.get("data")
    if isinstance(data, dict) and data.get("batch_size") == _AUTO:
        raise ConfigurationError(
            f"data.batch_size=auto searches for `equipoise fit`. Give {command} a number, such as data.batch_size=8."
        )
