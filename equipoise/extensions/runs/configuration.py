"""The keys in which the configurations of several runs differ."""

from collections.abc import Mapping, Sequence

from equipoise.app.earlier_runs.configurations import differences
from equipoise.extensions.runs.run import Run

__all__ = ["differences_between", "differing_keys", "with_classes"]

_CLASS = "._target_"
# What a run begins with tells nothing of what it is.
_UNTOLD = {"ckpt_path"}


def with_classes(configuration: Mapping[str, str]) -> dict[str, str]:
    """Return a configuration in which the value of a key is the name of the class that it builds.

    Example:
        >>> with_classes({"module._target_": "digits.module.ConvNet", "module.lr": "0.1"})
        {'module': 'ConvNet', 'module.lr': '0.1'}
    """
    named = {}
    for key, value in configuration.items():
        if key.endswith(_CLASS):
            named[key.removesuffix(_CLASS)] = value.rpartition(".")[2]
        else:
            named[key] = value
    return named


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the keys whose values differ between runs, those of most values first; runs without one do not count.

    Keys that some configurations lack come last.
    """
    configurations = [run.configuration for run in runs if run.configuration]
    keys: dict[str, None] = {}
    for configuration in configurations:
        keys.update(dict.fromkeys(key for key in configuration if key not in _UNTOLD))
    values = {key: {configuration.get(key) for configuration in configurations} for key in keys}
    differing = [key for key in keys if len(values[key]) > 1]
    return sorted(differing, key=lambda key: (None in values[key], -len(values[key])))


def differences_between(run: Run, other: Run) -> list[str]:
    """Return what differs in the configuration of a run from another's, as "module.lr: 0.1 → 0.2".

    Args:
        run: The run.
        other: The run that it is compared with, whose values stand first.
    """
    changes = differences(other.configuration, run.configuration)
    return [f"{key}: {before} → {after}" for key, (before, after) in changes.items()]
