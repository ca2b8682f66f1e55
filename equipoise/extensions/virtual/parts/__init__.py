"""Parts of a step: their batches, their steps, and the sums of their gradients; batches of an evaluation in rounds."""
