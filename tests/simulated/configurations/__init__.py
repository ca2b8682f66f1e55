"""The same fit on two simulated CUDA devices and on the CPU: strategies, precisions, options, modules, resumption."""
