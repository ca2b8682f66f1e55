"""The workers of a pipeline: their stages, tensors and optimisers."""
