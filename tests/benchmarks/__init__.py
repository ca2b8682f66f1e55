"""The benchmarks themselves are tested: that they compare like with like, and that their verdicts are right."""
