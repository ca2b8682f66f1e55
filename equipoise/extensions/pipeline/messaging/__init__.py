"""Commands and values that the processes of a pipeline exchange."""
