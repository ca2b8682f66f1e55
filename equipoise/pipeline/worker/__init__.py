"""Worker process of a pipeline, which has some of the stages."""
