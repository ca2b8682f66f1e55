"""Hydra groups of the `equipoise` command; group and file names equal folder and module names."""
