"""Tests that need a GPU: `pytest tests/gpu` on a machine with one. Most of them also run on simulated devices."""
