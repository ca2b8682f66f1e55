"""Public names, extensions, and patterns of names."""
