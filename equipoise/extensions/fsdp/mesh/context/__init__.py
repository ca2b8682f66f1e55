"""Context parallelism: the sequences of a batch are divided over the processes of a row."""
