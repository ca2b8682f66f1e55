"""Private names of torch and of Python's standard library."""
