"""Memory of a step as a function of the batch size."""
