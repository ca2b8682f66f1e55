"""Ways to train with less memory that change how a step is computed, but not its result."""
