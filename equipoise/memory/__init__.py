"""Readings of memory, one vocabulary for CPU and CUDA."""
