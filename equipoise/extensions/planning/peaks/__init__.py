"""A recorded step, and the peak of a device that follows from it."""
