"""The progress bar."""
