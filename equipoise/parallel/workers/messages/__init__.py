"""Messages of a worker to its parent: log records, and the report of its end."""
