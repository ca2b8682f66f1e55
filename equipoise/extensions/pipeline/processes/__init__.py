"""Stages computed by several processes."""
