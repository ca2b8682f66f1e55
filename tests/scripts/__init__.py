"""Tests of the programs for maintainers, and of the files that describe the project."""
