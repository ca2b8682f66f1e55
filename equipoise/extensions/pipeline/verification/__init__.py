"""The traced network compared with the forward itself."""
