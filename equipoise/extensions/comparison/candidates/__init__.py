"""The strategies that are compared, and how each changes a configuration."""
