"""Pages and charts: one file each, complete in itself."""
