"""Other programs in which a trainer runs. Each module needs its package, which is imported on first use."""
