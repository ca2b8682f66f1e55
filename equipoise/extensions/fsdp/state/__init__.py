"""State of a module in shards: whole, for any strategy, or in folders to which each process writes its shards."""
