"""Costs of each call of a network, and the cut that follows from them."""
