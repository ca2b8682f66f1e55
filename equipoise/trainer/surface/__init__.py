"""What users and Lightning's objects read from a trainer."""
