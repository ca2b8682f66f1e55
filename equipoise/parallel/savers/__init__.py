"""Ways to need less memory for activations, each by itself and without a trainer."""
