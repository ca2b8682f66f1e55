"""Importing this module installs the simulation: in the server of worker processes, before it imports torch."""

from tests.simulated.devices.installation import install

__all__: list[str] = []

install()
