"""State that a step or a run may change, saved and restored."""
