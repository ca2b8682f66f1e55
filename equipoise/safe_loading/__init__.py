"""Checkpoint files read as data: nothing in them is run."""
