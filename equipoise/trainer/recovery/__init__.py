"""Steps that are repeated after an out-of-memory error."""
