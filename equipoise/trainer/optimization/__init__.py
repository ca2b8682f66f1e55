"""One optimisation step: the user's step, its backward, the optimisers."""
