"""Blocks that compute parts of sequences in a network that has whole ones everywhere else."""
