"""Private names of `torch.vmap`."""
