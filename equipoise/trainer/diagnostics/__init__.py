"""Causes of errors and of values that are not finite."""
