"""Memory readings and profiles in the course of training."""
