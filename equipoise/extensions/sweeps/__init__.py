"""Sweeps: objectives, jobs on a pool of devices or as trials of Ray, tables of results."""
