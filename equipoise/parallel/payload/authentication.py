"""Authenticated messages between the processes of a run.

Unpickling runs code, so a process unpickles only messages with an authentication code (a keyed BLAKE2b) of the run's
key. Processes that `launch` starts receive a key over a private pipe. Processes that another launcher starts read it
from the environment variable `EQUIPOISE_SECRET`, the same on all machines; without it messages carry no code.
"""

import hashlib
import hmac
import os
import secrets

from equipoise.errors import ConfigurationError, WorkerError

__all__ = ["SECRET", "key_of_environment", "new_key", "opened", "sealed", "use_key"]

SECRET = "EQUIPOISE_SECRET"
# Shortest secret that cannot be guessed, in characters.
_SHORTEST = 16
# Length of a code and of a key in bytes.
_LENGTH = 32
# Key of this process: none or one.
_keys: list[bytes] = []


def new_key() -> bytes:
    """Return a random key."""
    return secrets.token_bytes(_LENGTH)


def key_of_environment() -> bytes | None:
    """Return the key that follows from the secret in the environment; None without a secret.

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
    """Seal and open messages of this process with a key from now on.

    Args:
        key: Key of the run; None for messages without a code.
    """
    _keys.clear()
    if key is not None:
        _keys.append(key)


def sealed(content: bytes) -> bytes:
    """Return a message of a content with its code; without a key, the content alone."""
    if not _keys:
        return content
    return _code(content) + content


def opened(message: bytes) -> bytes:
    """Return the content of a message.

    Raises:
        WorkerError: If its code is not that of this process's key.
    """
    if not _keys:
        return message
    code = message[:_LENGTH]
    content = message[_LENGTH:]
    if not hmac.compare_digest(code, _code(content)):
        raise WorkerError(
            "A message from another process was not made by this run: its code is wrong. It was not read. Another"
            f" program may have written to this run's ports, or {SECRET} differs between machines."
        )
    return content


def _code(content: bytes) -> bytes:
    return hashlib.blake2b(content, key=_keys[0], digest_size=_LENGTH).digest()
