"""The forward of a network, recorded while it runs, as a list of calls."""
