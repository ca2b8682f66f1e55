"""`data.batch_size=auto`: the largest batch size that fits, searched before the fit."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder

from equipoise.errors import ConfigurationError

__all__ = ["with_batch_size"]

_AUTO = "auto"
# Size of the first batches, of which the memory of all others is predicted.
_FIRST = 2


def with_batch_size(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Callback]]:
    """Return the configuration with a number for `data.batch_size`, and the callback that searches it.

    Args:
        values: The whole configuration. Where `data.batch_size` is not "auto", it is returned as it is, without a
            callback.

    Raises:
        ConfigurationError: If the size is "auto" in anything but a new fit.
    """
    data = values.get("data")
    if not isinstance(data, dict) or data.get("batch_size") != _AUTO:
        return dict(values), []
    if values["stage"] != "fit":
        raise ConfigurationError(
            f"data.batch_size=auto searches for a fit, not for {values['stage']}. Give a number, which may be larger"
            " than that of the fit."
        )
    # "last" may find no earlier run; with one, the batches of the first run go on.
    if values["ckpt_path"] is not None:
        raise ConfigurationError(
            "data.batch_size=auto searches for a new fit, but ckpt_path goes on from a checkpoint. Give the number that"
            " the first run has printed."
        )
    numbered = {**values, "data": {**data, "batch_size": _FIRST}}
    return numbered, [BatchSizeFinder(mode="binsearch", init_val=_FIRST)]
