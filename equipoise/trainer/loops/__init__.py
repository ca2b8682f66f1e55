"""Training: epochs and batches, validation between them, and the resumption from a checkpoint."""
