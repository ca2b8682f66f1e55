"""The stand-in for the compiler's backend, for all tests of this folder."""

from tests.support.lowering import Lowering, lowering

__all__ = ["Lowering", "lowering"]
