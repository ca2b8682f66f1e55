"""The way of a batch from the host to its device: copied in turn, or beside the step that computes."""
