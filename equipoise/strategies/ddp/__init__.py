"""Distributed data parallelism: a process for each device."""
