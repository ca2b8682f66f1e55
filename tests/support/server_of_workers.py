"""The server from which a program forks its workers, itself a fork of the program, with everything imported.

Multiprocessing starts an interpreter as its server, which imports torch and the trainer anew, for seconds. The fork is
made before the script of the program runs, so that the server knows nothing of the script and has no thread of it. It
waits until multiprocessing asks for a server, and then does what the interpreter would be asked for: it is a child of
the program, writes where the program writes, and gets the environment that the program has then.
"""

import array
import os
import pickle
import signal
import socket
from collections.abc import Sequence
from multiprocessing import util
from typing import Any, NoReturn

__all__ = ["prepare"]

_SERVERS_COMMAND = "from multiprocessing.forkserver import main;"
_LARGEST_REQUEST = 1 << 20  # bytes
_FIRST_FREE = 900  # above all descriptors that a program has open


def prepare() -> None:
    """Fork the server of this process, and let multiprocessing find it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        here.close()
        _wait_and_serve(there)
    there.close()
    start_interpreter = util.spawnv_passfds
    unused = [pid]

    def start(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        """Take the place of `multiprocessing.util.spawnv_passfds`: return the id of the process."""
        command = arguments[-1]
        if not (unused and isinstance(command, str) and command.startswith(_SERVERS_COMMAND)):
            return start_interpreter(path, arguments, descriptors)
        request = pickle.dumps((command, dict(os.environ), list(descriptors)))
        here.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
        return unused.pop()

    util.spawnv_passfds = start


def _wait_and_serve(requests: socket.socket) -> NoReturn:
    """Serve as multiprocessing asks; end where the program ends without having asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    try:
        exec(command, {})  # noqa: S102
    except SystemExit:
        status = 0
    finally:
        os._exit(status)
