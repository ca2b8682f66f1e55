"""What several extensions share and the core does not need."""
