"""Private names of torch's compiler."""
