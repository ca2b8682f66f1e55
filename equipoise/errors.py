"""The errors Equipoise raises on its own account; each is also a standard exception, so generic handlers catch it."""

__all__ = ["CheckpointError", "ConfigurationError", "StepError", "WorkerError"]


class ConfigurationError(ValueError):
    """An argument, or a combination of arguments, that cannot work; raised before any training."""


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged, of another model, or not safe to read."""


class StepError(RuntimeError):
    """A step of the user's module returned or asked for something that cannot be trained on."""


class WorkerError(RuntimeError):
    """A process of the run was killed, left, or hung; an error that it raised is raised as what it is."""
