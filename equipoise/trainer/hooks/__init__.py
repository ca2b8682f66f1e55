"""Hooks: which are overridden, how they are called, and their misspelled names."""
