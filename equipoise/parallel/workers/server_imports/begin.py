"""The first import of the server of worker processes: pauses the garbage collector until the last one."""

import gc

__all__: list[str] = []

gc.disable()
