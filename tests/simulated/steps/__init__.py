"""Cost of a step beside its arithmetic: the operations that it launches, and the waits of the host for a device."""
