"""The loops over epochs and batches, and the way back into them."""
