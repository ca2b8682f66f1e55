"""A process as under Windows, as far as a process of Linux can be one; see `absences`."""

import faulthandler
import mmap
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any

import psutil

from tests.platforms.absences import beginning, deny_linux_files, import_packages, lack, pretend_to_be
from tests.platforms.windows_files import restrict_files

__all__ = ["LACKING", "MODULES", "simulate_windows"]

_SIGNALS = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN")


# Names of the standard library that Windows lacks, by their modules.
LACKING = {
    faulthandler: ["register", "unregister"],
    mmap: beginning(mmap, "MAP_", "PROT_", "MADV_"),
    os: [
        *("chown", "chroot", "confstr", "copy_file_range", "ctermid", "environb", "eventfd", "eventfd_read", "fchdir"),
        *("fchmod", "fchown", "fdatasync", "fork", "forkpty", "fpathconf", "fstatvfs", "get_blocking", "getegid"),
        *("getenvb", "geteuid", "getgid", "getgrouplist", "getgroups", "getloadavg", "getpgid", "getpgrp"),
        *("getpriority", "getresgid", "getresuid", "getsid", "getuid", "initgroups", "killpg", "lchown", "lockf"),
        *("major", "makedev", "memfd_create", "minor", "mkfifo", "mknod", "nice", "openpty", "pathconf"),
        *("pidfd_open", "pipe2", "posix_fadvise", "posix_fallocate", "posix_spawn", "posix_spawnp", "pread", "preadv"),
        *("pwrite", "pwritev", "readv", "register_at_fork", "sendfile", "set_blocking", "setegid", "seteuid"),
        *("setgid", "setgroups", "setns", "setpgid", "setpriority", "setregid", "setresgid", "setresuid", "setreuid"),
        *("setsid", "setuid", "splice", "statvfs", "sync", "sysconf", "tcgetpgrp", "tcsetpgrp", "ttyname", "uname"),
        *("unshare", "wait", "wait3", "wait4", "waitid", "writev"),
        *beginning(os, "CLD_", "EX_", "F_", "MFD_", "POSIX_", "PRIO_", "RTLD_", "SCHED_", "W", but=("W_OK",)),
        *beginning(os, "O_", but=("O_APPEND", "O_CREAT", "O_EXCL", "O_RDONLY", "O_RDWR", "O_TRUNC", "O_WRONLY")),
        *beginning(os, "sched_"),
    ],
    select: ["epoll", "poll"],
    signal: [
        *("alarm", "getitimer", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "siginterrupt", "sigpending"),
        *("sigtimedwait", "sigwait", "sigwaitinfo"),
        *beginning(signal, "SIG", "ITIMER_", but=_SIGNALS),
    ],
    socket: ["AF_UNIX", "SO_REUSEPORT", "recv_fds", "send_fds"],
    time: ["pthread_getcpuclockid", "tzset", *beginning(time, "clock_", "CLOCK_")],
}

# Modules that Windows lacks; the last three are there, but cannot be used.
MODULES = (
    *("fcntl", "grp", "nis", "pty", "pwd", "readline", "resource", "spwd", "syslog", "termios", "tty"),
    *("multiprocessing.forkserver", "multiprocessing.popen_fork", "multiprocessing.popen_forkserver"),
)


def simulate_windows() -> None:
    """Let the rest of this process be as under Windows."""
    import_packages()
    # Python has looked for these when it was imported, or would look for them again.
    shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]
    lack(LACKING, MODULES, start_methods=("fork", "forkserver"))
    psutil.Process.memory_info = _memory_info
    deny_linux_files()
    restrict_files()
    # Python would start programs as under Linux, such as git: it finds none.
    os.environ["PATH"] = ""
    pretend_to_be("win32", "Windows")
    # That of pipes and files, in Western Europe and America.
    sys.stdout.reconfigure(encoding="cp1252")  # type: ignore[union-attr]


_of_linux = psutil.Process.memory_info


class _MemoryInfo:
    """The fields that psutil reads under Windows."""

    def __init__(self, rss: int) -> None:
        self.rss = rss
        self.peak_wset = rss


def _memory_info(process: psutil.Process) -> Any:
    return _MemoryInfo(_of_linux(process).rss)
