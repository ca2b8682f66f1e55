"""Searches before a fit, for a learning rate or a batch size; each makes short fits of a copy of the module."""
