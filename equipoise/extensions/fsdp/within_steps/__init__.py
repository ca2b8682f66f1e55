"""What the user's steps read and change of a module in shards: values, gradients and `requires_grad`."""
