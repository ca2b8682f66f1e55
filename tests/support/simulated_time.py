"""A clock that stands still but for simulated devices: they set it forward instead of sleeping."""

import threading

__all__ = ["SimulatedTime"]


class SimulatedTime:
    """Stands for the module `time`; every thread has a time of its own, so that devices do not disturb each other."""

    def __init__(self) -> None:
        self._passed = threading.local()

    def perf_counter(self) -> float:
        return getattr(self._passed, "seconds", 0.0)

    def sleep(self, seconds: float) -> None:
        self._passed.seconds = self.perf_counter() + seconds
