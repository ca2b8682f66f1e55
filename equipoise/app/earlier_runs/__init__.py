"""Runs before the present one: their checkpoints, and what they were configured with."""
