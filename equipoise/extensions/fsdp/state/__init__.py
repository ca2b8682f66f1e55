"""State of a module in shards: whole, for any strategy or for a step, or in folders to which all processes write."""
