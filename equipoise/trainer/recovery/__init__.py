"""Steps done again after an error of memory."""
