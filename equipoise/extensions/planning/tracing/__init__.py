"""A step that runs on tensors without memory, recorded."""
