"""Names of values that differ by nature between any two runs."""

import re

__all__ = ["differs_by_nature", "entry_differs_by_nature"]

# Times, memory and speed.
_WORDS = (
    *("date", "duration", "elapsed", "ms", "secs?", "seconds", "times?", "timestamp"),
    *("mem", "memory", "utilization"),
    *("flops", "mfu", "throughput"),
)
_PATTERN = re.compile(
    rf"(^|[^a-z])({'|'.join(_WORDS)})($|[^a-z])|per_second|/s$|^DeviceStatsMonitor", flags=re.IGNORECASE
)

_ENTRIES = {
    # The settings of a run, and the program that wrote it.
    *("hyper_parameters", "hparams_name", "hparams_type", "pytorch-lightning_version"),
    *("datamodule_hyper_parameters", "datamodule_hparams_name", "datamodule_hparams_type"),
    # Its identity, and its files.
    *("run", "rows", "written_in", "dirpath", "best_model_path", "best_k_models", "kth_best_model_path"),
    *("last_model_path", "last_checkpoint_saved"),
}

# Sums of all that an epoch has logged, times among them.
_LOGGED_SUMS = "logs.entries"


def differs_by_nature(name: str) -> bool:
    """Return whether a logged value differs by nature.

    Example:
        >>> differs_by_nature("step_time"), differs_by_nature("second_loss")
        (True, False)
    """
    return _PATTERN.search(name) is not None


def entry_differs_by_nature(place: str, key: str) -> bool:
    """Return whether an entry of a checkpoint differs by nature.

    Args:
        place: The keys that lead to it, separated by dots.
        key: The last of them.
    """
    if key in _ENTRIES or place.endswith(_LOGGED_SUMS):
        return True
    # The key of a callback's state holds its options.
    return "{" not in key and differs_by_nature(key)
