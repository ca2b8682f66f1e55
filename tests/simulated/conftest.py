"""The tests of the simulation itself are collected where it is installed, by `plugin`."""

from tests.simulated.devices.installation import is_installed

collect_ignore = [] if is_installed() else ["test_simulation.py", "test_recovery.py", "test_waits.py"]
