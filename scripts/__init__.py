"""Programs for maintainers."""
