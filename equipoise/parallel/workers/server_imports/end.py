"""The last import of the server of worker processes: its objects are never collected as garbage.

The collections of a worker then neither look through these objects nor copy their pages of memory, which all workers
share (see `gc.freeze` in Python's documentation).
"""

import gc

__all__: list[str] = []

gc.freeze()
gc.enable()
