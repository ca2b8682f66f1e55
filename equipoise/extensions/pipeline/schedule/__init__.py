"""Order of forwards and backwards of micro-batches, and the times at which they run."""
