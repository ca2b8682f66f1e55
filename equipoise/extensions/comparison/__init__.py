"""`equipoise compare`: the user's module under each strategy, measured."""
