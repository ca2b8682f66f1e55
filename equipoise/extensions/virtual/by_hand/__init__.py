"""Manual optimisation: parts of a step run in turn, and take backwards and steps of optimisers together."""
