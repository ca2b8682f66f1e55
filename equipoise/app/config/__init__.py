"""Configurations of the command: their schema, and checks of their values."""
