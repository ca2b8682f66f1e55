"""A project in which limits are planted by arguments."""
