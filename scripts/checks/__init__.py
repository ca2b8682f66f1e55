"""Checks of a release, each of which returns what is wrong as lines of text."""
