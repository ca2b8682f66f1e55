"""Processes that compute together: ranks, groups, exchanged values and gradients."""
