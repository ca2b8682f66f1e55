"""Batches and random numbers of each member."""
