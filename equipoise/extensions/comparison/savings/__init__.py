"""`equipoise savings`: a step of the user's module under each memory saver, measured."""
