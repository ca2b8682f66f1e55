"""Forwards that run as they are, and stop at the layers of a stack, where the next stage begins."""
