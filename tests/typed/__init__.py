"""Tests of the annotations that a user's type checker reads."""
