"""Short runs of a copy of the module, and what the searches set and predict for them."""
