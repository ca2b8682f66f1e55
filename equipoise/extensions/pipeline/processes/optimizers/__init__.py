"""Optimisers that step the parameters of all processes, seen from the main process."""
