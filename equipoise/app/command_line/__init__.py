"""The command line of `equipoise`: commands and their help, run stages, folders, completion, the starter project."""
