"""Processes that train replicas compare them, and end together where they differ."""
