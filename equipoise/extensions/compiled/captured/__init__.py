"""Traced training steps that are captured as CUDA graphs, and replayed."""
