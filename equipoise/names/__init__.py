"""Public names: where they are defined, and where they were. Patterns of names."""
