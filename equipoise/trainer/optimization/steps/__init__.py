"""One training step: the call of the module, its backward, what is logged, and what extensions change."""
