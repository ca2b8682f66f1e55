"""Reasons for which a step or block stays eager after an error of its program."""

from equipoise.memory.out_of_memory import is_out_of_memory

__all__ = ["ran_out_of_memory", "reason_of"]


def ran_out_of_memory(error: Exception) -> bool:
    """Return True for an error of memory."""
    return isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error)


def reason_of(error: Exception, done: str) -> str:
    """Return the reason for which a step or block stays eager after an error of its program.

    Args:
        error: The error.
        done: The kind of program: "compiled" or "captured".
    """
    if ran_out_of_memory(error):
        return f"there is not enough memory to compare it with a {done} one"
    first_line = str(error).partition("\n")[0].rstrip(".")
    return f"a {done} one ends with an error ({type(error).__name__}: {first_line})"
