"""State of objects as plain data, which a checkpoint can hold."""
