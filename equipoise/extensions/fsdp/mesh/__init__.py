"""Several processes that compute each batch together, by layers that the module cuts over a device mesh."""
