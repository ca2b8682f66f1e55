"""The time of a run, by parts of a step, and the part that limits it."""
