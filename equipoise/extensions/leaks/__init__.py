"""Growth of memory from step to step, and the references that keep it."""
