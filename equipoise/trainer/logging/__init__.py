"""Values logged by `self.log`, and their way to the loggers."""
