"""The first and the last import of the server of worker processes."""
