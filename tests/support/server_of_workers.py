"""The server from which a program, or the run of tests, forks its workers: itself a fork, with everything imported.

Multiprocessing starts an interpreter as its server, which imports torch and the trainer anew, for seconds. The fork is
made before the script of the program, or the first test, runs, so that the server knows nothing of it and has no thread
of it. It waits until multiprocessing asks for a server, and then does what the interpreter would be asked for: it is a
child of the program, writes where the program writes, and gets the environment that the program has then.
"""

import array
import faulthandler
import importlib
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from multiprocessing import util
from typing import Any, NoReturn

__all__ = ["prepare"]

_SERVERS_COMMAND = "from multiprocessing.forkserver import main;"
_LARGEST_REQUEST = 1 << 20  # bytes
_FIRST_FREE = 900  # above all descriptors that a program has open


def prepare() -> int:
    """Fork the server of this process, and let multiprocessing find it.

    Returns:
        The id of its process.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        here.close()
        _wait_and_serve(there)
    there.close()
    number = here.detach()  # of its descriptor, which closes with the process if nobody asks
    start_interpreter = util.spawnv_passfds
    unused = [pid]

    def start(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        """Take the place of `multiprocessing.util.spawnv_passfds`: return the id of the process."""
        command = arguments[-1]
        if not (unused and isinstance(command, str) and command.startswith(_SERVERS_COMMAND)):
            return start_interpreter(path, arguments, descriptors)
        request = pickle.dumps((command, dict(os.environ), list(descriptors)))
        with socket.socket(fileno=number) as requests:
            requests.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
        return unused.pop()

    util.spawnv_passfds = start
    return pid


def _wait_and_serve(requests: socket.socket) -> NoReturn:
    """Serve as multiprocessing asks; end where the program ends without having asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave_pytest()
    request, descriptors, _, _ = socket.recv_fds(requests, _LARGEST_REQUEST, 8)
    if not request:
        os._exit(0)
    command, environment, numbers = pickle.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    # The command names the descriptors by the numbers that they have in the program.
    moved = [os.dup2(descriptor, _FIRST_FREE + index) for index, descriptor in enumerate(descriptors)]
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    status = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as workers find it
    try:
        exec(command, {})  # noqa: S102
    except SystemExit:
        status = 0
    finally:
        os._exit(status)


def _leave_pytest() -> None:
    """Take back what pytest has set: errors and warnings of workers go where those of an interpreter go."""
    faulthandler.disable()
    sys.excepthook = sys.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.getLogger().handlers.clear()
    importlib.reload(warnings)  # without filters and a list of its own
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
