"""The fixtures of tests of callbacks: terminals, files to draw on, and a clock."""

from tests.callbacks.conftest import *  # noqa: F403
