"""Trials: a few steps of the configured module, each trial in a process of its own with a bound of time."""
