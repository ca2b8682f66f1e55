"""Private names of torch's distributed package."""
