"""Copies of a module on other devices."""
