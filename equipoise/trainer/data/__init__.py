"""Loaders, and the passes over them."""
