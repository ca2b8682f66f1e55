"""Trials of steps and blocks: tolerances, costs, and reasons against a program that ends with an error."""
