"""Exchange of gradients in steps by hand: whatever function computes them, in all processes alike."""
