"""Several optimisers of one run."""
