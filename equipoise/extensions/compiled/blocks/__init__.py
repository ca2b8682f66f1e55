"""Blocks of a network that are compiled one by one, for steps that are computed in parts or in several processes."""
