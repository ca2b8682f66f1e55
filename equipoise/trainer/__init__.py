"""The trainer: options, loops and what they keep."""
