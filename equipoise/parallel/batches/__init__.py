"""Batches cut into parts, results put together, weights and shares."""
