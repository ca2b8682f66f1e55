"""CUDA devices that are simulated on a CPU, and the tests that run on them, in processes of their own."""
