"""Checkpoints whose tensors lie in shards: a folder with a file for each process, read as data alone."""
