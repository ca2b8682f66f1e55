"""The fixture of the benchmarks' tests."""

from tests.support.benchmarks import scripts

__all__ = ["scripts"]
