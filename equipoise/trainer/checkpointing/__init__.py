"""Checkpoint files: written, chosen, read and checked."""
