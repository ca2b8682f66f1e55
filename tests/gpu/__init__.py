"""What needs a GPU: `pytest tests/gpu` on a machine with one. Most of it also runs on simulated devices."""
