"""Digits drawn by a network: two networks that are trained against each other, in manual optimisation."""
