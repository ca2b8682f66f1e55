"""Micro-batches computed by the stages of one process."""
