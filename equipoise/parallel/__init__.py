"""Mechanisms that know neither strategy nor trainer."""
