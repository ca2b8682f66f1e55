"""What an error or a bad value is about."""
