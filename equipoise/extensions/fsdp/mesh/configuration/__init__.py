"""What `configure_model` does to a module whose layers it cuts over a row of processes."""
