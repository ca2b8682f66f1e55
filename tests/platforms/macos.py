"""A process as under macOS, as far as a process of Linux can be one; see `absences`."""

import ctypes
import os
import select
import signal
import socket
import tempfile
import time
from types import SimpleNamespace

from tests.platforms.absences import beginning, deny_linux_files, import_packages, lack, pretend_to_be

__all__ = ["simulate_macos"]

# Names of the standard library that macOS lacks, by their modules.
_LACKING = {
    os: [
        *("copy_file_range", "eventfd", "eventfd_read", "eventfd_write", "fdatasync", "getrandom", "getresgid"),
        *("getresuid", "memfd_create", "pidfd_open", "pipe2", "posix_fadvise", "posix_fallocate", "setns"),
        *("setresgid", "setresuid", "splice", "unshare"),
        *("O_DIRECT", "O_LARGEFILE", "O_NOATIME", "O_PATH", "O_RSYNC", "O_TMPFILE"),
        *beginning(os, "MFD_", "POSIX_FADV_", "SCHED_", "sched_", but=("sched_yield",)),
    ],
    select: beginning(select, "EPOLL", "epoll"),
    signal: ["SIGCLD", "SIGPOLL", "SIGPWR", "SIGRTMAX", "SIGRTMIN", "SIGSTKFLT", "sigtimedwait", "sigwaitinfo"],
    socket: beginning(socket, "AF_NETLINK", "AF_PACKET", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
    time: ["CLOCK_BOOTTIME", "CLOCK_TAI", "pthread_getcpuclockid"],
}


def simulate_macos() -> None:
    """Let the rest of this process be as under macOS."""
    import_packages()
    # tempfile looks for it whenever it makes a file.
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]
    lack(_LACKING, modules=(), start_methods=())
    deny_linux_files()
    # The library of the system has no `renameat2`.
    ctypes.pythonapi = SimpleNamespace()  # type: ignore[assignment]
    pretend_to_be("darwin", "Darwin")
