"""The forward of a network as a list of calls, cut into stages."""
