"""Training steps on parts of sequences."""
