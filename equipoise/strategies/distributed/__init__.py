"""Strategies of several processes: what they share of data, modules and metrics."""
