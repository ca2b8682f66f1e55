"""A network's forward while it runs: its side effects, the lines of its code, layers lent to a device."""
