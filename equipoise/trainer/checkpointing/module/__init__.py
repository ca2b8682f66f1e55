"""The module in a checkpoint: names of its weights, and what its `state_dict` leaves out."""
