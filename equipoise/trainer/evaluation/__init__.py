"""Validation, test and prediction: every batch once, without gradients."""
