"""Training steps that are captured as CUDA graphs, on simulated devices."""
