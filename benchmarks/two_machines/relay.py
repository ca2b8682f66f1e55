"""A cable between two TUN devices: packets arrive late, at a bounded rate, and not at all while the cable is out.

python relay.py FIRST SECOND      "out" and "in" on standard input pull the cable out and put it in again
"""

import collections
import contextlib
import fcntl
import os
import select
import struct
import sys
import time

RATE = 125e6  # bytes a second: 1 Gbit/s in each direction
DELAY = 8e-4  # seconds that a packet is held on its way; with the relay itself, it takes 1 ms
ROOM = 2e6  # bytes that wait for the rate; more is dropped, as by a switch
MTU = 16000
PAUSE = 1e-4  # seconds between two looks at the devices, which saves half of the processor

_SET_INTERFACE, _PLAIN_PACKETS = 0x400454CA, 0x1001


class Direction:
    """Packets on their way from one device to the other.

    Args:
        source: File descriptor of the device to which a machine sends.
        target: File descriptor of the device from which the other one receives.
    """

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.waiting: collections.deque[tuple[float, bytes]] = collections.deque()
        self.free_at = 0.0

    def take(self, *, is_out: bool) -> None:
        """Read all packets that were sent, and say when they arrive."""
        while True:
            try:
                packet = os.read(self.source, MTU)
            except BlockingIOError:
                return
            now = time.perf_counter()
            begin = max(self.free_at, now)
            if is_out or (begin - now) * RATE > ROOM:
                continue
            self.free_at = begin + len(packet) / RATE
            self.waiting.append((self.free_at + DELAY, packet))

    def deliver(self) -> None:
        """Write the packets whose time has come."""
        while self.waiting and self.waiting[0][0] <= time.perf_counter():
            packet = self.waiting.popleft()[1]
            with contextlib.suppress(OSError):  # a device that is not up yet
                os.write(self.target, packet)


def open_device(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH14x", name.encode(), _PLAIN_PACKETS))
    return device


def main(names: list[str]) -> None:
    """Relay until standard input ends."""
    first, second = (open_device(name) for name in names)
    directions = {first: Direction(first, second), second: Direction(second, first)}
    print("ready", flush=True)
    is_out = False
    while True:
        times = [direction.waiting[0][0] for direction in directions.values() if direction.waiting]
        wait = max(min(times) - time.perf_counter(), 0.0) if times else None
        for readable in select.select([*directions, 0], [], [], wait)[0]:
            if readable:
                directions[readable].take(is_out=is_out)
            elif command := os.read(0, 16):
                is_out = command.strip() == b"out"
            else:
                return
        for direction in directions.values():
            direction.deliver()
        time.sleep(PAUSE)


if __name__ == "__main__":
    main(sys.argv[1:])
