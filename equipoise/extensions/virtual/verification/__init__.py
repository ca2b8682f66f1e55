"""A proof in the run: parts of a step are computed once more in another place, and compared bit for bit."""
