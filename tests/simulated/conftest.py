"""The tests of the simulation itself are collected where it is installed, by `plugin`."""

from tests.simulated.devices.installation import is_installed

_NAMES = ("simulation", "streams", "graphs", "recovery", "defects", "prefetch", "planning")
_FOLDERS = ("captured", "configurations", "steps")

collect_ignore = [] if is_installed() else [*(f"test_{name}.py" for name in _NAMES), *_FOLDERS]
