"""The exchange of gradients between the processes of DDP."""
