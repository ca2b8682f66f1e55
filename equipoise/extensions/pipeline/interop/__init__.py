"""Private names of other packages that a pipeline uses."""
