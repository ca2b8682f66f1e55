"""Evaluations without gradients in the midst of training."""
