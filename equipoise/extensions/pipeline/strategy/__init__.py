"""The network cut into stages on several devices."""
