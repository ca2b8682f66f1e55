"""State that a step or a run may change, noted and brought back."""
