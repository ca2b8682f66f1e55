"""State of a run in plain data: counters and the present stage."""
