"""Training steps that torch's compiler computes, checked against the steps that Python runs."""
