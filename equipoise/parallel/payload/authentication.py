"""Authenticated messages between the processes of a run.

Unpickling runs code, so a process unpickles only what carries a code (a keyed BLAKE2b) that the key of the run made.
Processes that `launch` starts get a key over a private pipe. Those that something else has started take it from the
environment variable `EQUIPOISE_SECRET`, the same on all machines; without it messages carry no code.
"""

import hashlib
import hmac
import os
import secrets

from equipoise.errors import ConfigurationError, WorkerError

__all__ = ["SECRET", "key_of_environment", "new_key", "opened", "sealed", "use_key"]

SECRET = "EQUIPOISE_SECRET"
_SHORTEST = 16  # characters of a secret that cannot be guessed
_LENGTH = 32  # bytes of a code
_keys: list[bytes] = []  # of this process: none or one


def new_key() -> bytes:
    """Return a key that nobody can guess."""
    return secrets.token_bytes(_LENGTH)


def key_of_environment() -> bytes | None:
    """Return the key that follows from the secret in the environment; None if there is none.

    Raises:
        ConfigurationError: If the secret can be guessed.
    """
    secret = os.environ.get(SECRET, "")
    if not secret:
        return None
    if len(secret) < _SHORTEST:
        raise ConfigurationError(
            f"{SECRET} has {len(secret)} characters, but needs {_SHORTEST} at least. Take the output of"
            ' `python -c "import secrets; print(secrets.token_hex())"`.'
        )
    return hashlib.blake2b(secret.encode(), digest_size=_LENGTH).digest()


def use_key(key: bytes | None) -> None:
    """Seal and open messages of this process with a key from now on; None: without."""
    _keys[:] = [] if key is None else [key]


def sealed(content: bytes) -> bytes:
    """Return a message with its code, if this process has a key."""
    return _code(content) + content if _keys else content


def opened(message: bytes) -> bytes:
    """Return what a message holds.

    Raises:
        WorkerError: If its code is not that of this process's key.
    """
    if not _keys:
        return message
    code, content = message[:_LENGTH], message[_LENGTH:]
    if not hmac.compare_digest(code, _code(content)):
        raise WorkerError(
            "A message from another process was not made by this run: its code is wrong. It was not read. Another"
            f" program may have written to this run's ports, or {SECRET} differs between machines."
        )
    return content


def _code(content: bytes) -> bytes:
    return hashlib.blake2b(content, key=_keys[0], digest_size=_LENGTH).digest()
