"""Efficiency of a run: its operations against the peak of the device, tokens and samples a second, energy."""
