"""`equipoise tune`: find what limits a run, and measure the remedies in short copies of it."""
