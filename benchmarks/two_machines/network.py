"""Two machines on this one: network namespaces, each with an address, between which a relay carries packets."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import relay

__all__ = ["ADDRESSES", "INTERFACE", "Network", "measured", "network"]

ADDRESSES = ("10.77.0.1", "10.77.0.2")
MACHINES = tuple(f"machine{machine}-{os.getpid()}" for machine in range(2))
INTERFACE = "net0"


class Network:
    """Two machines and the cable between them.

    Args:
        cable: The process that carries packets.
    """

    def __init__(self, cable: "subprocess.Popen[str]") -> None:
        self.cable = cable

    def command(self, machine: int, program: list[str]) -> list[str]:
        """Return the command that runs a program on a machine."""
        return ["ip", "netns", "exec", MACHINES[machine], *program]

    def pull(self, *, out: bool) -> None:
        """Pull the cable out, or puts it in again."""
        assert self.cable.stdin
        self.cable.stdin.write("out\n" if out else "in\n")
        self.cable.stdin.flush()

    def busy_seconds(self) -> float:
        """Seconds for which the relay has computed."""
        times = psutil.Process(self.cable.pid).cpu_times()
        return float(times.user + times.system)

    def processes(self, machine: int) -> list[int]:
        """Return the processes that run on a machine."""
        return [int(pid) for pid in _ip("netns", "pids", MACHINES[machine]).split()]

    def kill(self, machine: int) -> None:
        """End all processes of a machine, as if it had lost its power."""
        for pid in self.processes(machine):
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()


@contextmanager
def network() -> Iterator[Network]:
    """Two machines for a block, after which nothing of them is left.

    Raises:
        SystemExit: If they cannot be made here.
    """
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        raise SystemExit("Network namespaces and TUN devices need root and /dev/net/tun.")
    names = [f"cable{machine}-{os.getpid()}" for machine in range(2)]
    script = [sys.executable, relay.__file__, *names]
    # In a session of its own, so that Ctrl-C leaves the cable in until the machines are gone.
    with subprocess.Popen(
        script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as cable:
        both = Network(cable)
        try:
            assert cable.stdout
            if cable.stdout.readline() != "ready\n":
                raise SystemExit("The relay could not open its TUN devices.")
            os.sched_setscheduler(cable.pid, os.SCHED_RR, os.sched_param(2))  # a cable waits for no processor
            for machine, name in enumerate(names):
                _connect(machine, name)
            yield both
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # a second one would leave something behind
            with suppress(subprocess.CalledProcessError):  # a machine that was not made
                both.kill(0)
                both.kill(1)
            cable.terminate()
            cable.wait()
            for space in MACHINES:
                with suppress(subprocess.CalledProcessError):
                    _ip("netns", "delete", space)


def _connect(machine: int, name: str) -> None:
    """Make a namespace and give it one end of the cable."""
    space = MACHINES[machine]
    _ip("netns", "add", space)
    _ip("link", "set", name, "netns", space, "name", INTERFACE, "mtu", str(relay.MTU))
    _ip("-n", space, "link", "set", "lo", "up")
    _ip("-n", space, "address", "add", f"{ADDRESSES[machine]}/24", "dev", INTERFACE)
    _ip("-n", space, "link", "set", INTERFACE, "up")


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


# What the cable can do; the two programs wait for no processor, either.


_SERVE = """
import os, socket
os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
with socket.create_server(("", 29400)) as server:
    print("ready", flush=True)
    small, _ = server.accept()
    small.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := small.recv(1):
        small.sendall(data)
    large, _ = server.accept()
    while large.recv(1 << 20):
        pass
"""

_ASK = """
import os, socket, statistics, sys, time
os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
small = socket.create_connection((sys.argv[1], 29400))
small.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
for _ in range(200):
    start = time.perf_counter()
    small.sendall(b".")
    small.recv(1)
    times.append(time.perf_counter() - start)
small.close()
large, start = socket.create_connection((sys.argv[1], 29400)), time.perf_counter()
for _ in range(500):
    large.sendall(bytes(1000000))
large.shutdown(socket.SHUT_WR)
large.recv(1)
print(statistics.median(times), 5e8 / (time.perf_counter() - start))
"""


def measured(both: Network) -> tuple[float, float, float]:
    """Return seconds to the other machine and back, bytes a second of a plain socket, and the relay's load by it."""
    with subprocess.Popen(both.command(1, [sys.executable, "-c", _SERVE]), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        server.stdout.readline()
        busy, start = both.busy_seconds(), time.perf_counter()
        asked = subprocess.run(
            both.command(0, [sys.executable, "-c", _ASK, ADDRESSES[1]]),
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        share = (both.busy_seconds() - busy) / (time.perf_counter() - start)
    seconds, rate = asked.stdout.split()
    return float(seconds), float(rate), share
