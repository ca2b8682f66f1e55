"""Images that a run has logged, in its report."""
