"""Traces in a process of their own, which may end without harm."""
