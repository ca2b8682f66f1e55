"""Worker processes that the trainer starts on this machine."""
