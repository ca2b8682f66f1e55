"""The bench of both commands: a trial in a process of its own, and what is measured there."""
