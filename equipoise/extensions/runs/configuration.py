"""The keys in which the configurations of several runs differ."""

from collections.abc import Sequence

from equipoise.app.earlier_runs.configurations import differences
from equipoise.extensions.runs.run import Run

__all__ = ["differences_between", "differing_keys"]


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the keys whose values differ between runs, those that all have first; runs without one do not count."""
    configurations = [run.configuration for run in runs if run.configuration]
    keys: dict[str, None] = {}
    for configuration in configurations:
        keys.update(dict.fromkeys(configuration))
    everywhere = []
    somewhere = []
    for key in keys:
        texts = {configuration.get(key) for configuration in configurations}
        if None in texts:
            somewhere.append(key)
        elif len(texts) > 1:
            everywhere.append(key)
    return everywhere + somewhere


def differences_between(run: Run, other: Run) -> list[str]:
    """Return what differs in the configuration of a run from another's, as "module.lr: 0.1 → 0.2".

    Args:
        run: The run.
        other: The run that it is compared with, whose values stand first.
    """
    changes = differences(other.configuration, run.configuration)
    return [f"{key}: {before} → {after}" for key, (before, after) in changes.items()]
