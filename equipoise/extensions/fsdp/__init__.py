"""Fully sharded data parallelism: parameters, gradients and optimiser states in shards over processes."""
