"""Fixtures of the tests of callbacks."""

from tests.support.terminal_fixtures import clock, make_terminal, plain, surroundings, terminal

__all__ = ["clock", "make_terminal", "plain", "surroundings", "terminal"]
