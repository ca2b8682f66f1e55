"""Attributes of a trainer that users and Lightning's objects read."""
