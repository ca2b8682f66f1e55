"""The trial of a strategy: memory by device, time, idle time, weights, the largest batch."""
