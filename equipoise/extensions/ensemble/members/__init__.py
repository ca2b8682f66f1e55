"""The members of an ensemble: their first weights, and their tensors during a run."""
