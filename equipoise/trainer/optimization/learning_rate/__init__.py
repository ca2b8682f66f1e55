"""The search for a learning rate before a fit, a short fit of a copy of the module."""
