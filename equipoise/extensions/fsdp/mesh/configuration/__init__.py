"""The hook `configure_model` and the layers that it cuts over a row of processes."""
