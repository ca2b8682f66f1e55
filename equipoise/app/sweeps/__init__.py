"""Sweeps: the objective of a trial, the jobs, their progress and the table of their results."""
