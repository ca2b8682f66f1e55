"""Optimisers and schedulers that `configure_optimizers` returned."""
