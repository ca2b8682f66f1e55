"""The proof of a run: its first steps as the user's program computes them, and on one device, compared."""
