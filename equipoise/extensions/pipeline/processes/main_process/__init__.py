"""The main process of a pipeline: commands to the workers, and the tensors and stages that they have."""
