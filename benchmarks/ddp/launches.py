"""Starts processes again and again: none may hang, abort or stay behind.

python benchmarks/ddp/launches.py              a hundred launches, some minutes
python benchmarks/ddp/launches.py --count 10
"""

import argparse
import sys
import time
from datetime import timedelta
from functools import partial

import psutil
import torch
import torch.distributed as dist

from equipoise.parallel.communication.process_group import StoreServer, follows_from_another, joined
from equipoise.parallel.communication.rank import Rank
from equipoise.parallel.workers.launch import launch
from equipoise.parallel.workers.preloading import preload

# As strategies of several processes do: their workers need not import these.
preload("equipoise.parallel.communication.process_group")


def work(port: int, processes: int, rank: int) -> float:
    """A few exchanges in a group of its own."""
    place = Rank(rank, rank, 0, processes, processes)
    with joined(place, torch.device("cpu"), timeout=timedelta(seconds=60), port=port):
        value = torch.full((1000,), float(rank))
        for _ in range(3):
            dist.all_reduce(value)
        return float(value[0])


def main(command: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="launches (default: 100)")
    parser.add_argument("--processes", type=int, default=2, help="processes of each (default: 2)")
    options = parser.parse_args(command)
    seconds = []
    for number in range(1, options.count + 1):
        start = time.perf_counter()
        store = StoreServer()
        launch(partial(work, store.port, options.processes), options.processes, is_consequence=follows_from_another)
        seconds.append(time.perf_counter() - start)
        print(f"\r{number} of {options.count}", end="", file=sys.stderr, flush=True)
    others = psutil.Process().children(recursive=True)
    left = [other for other in others if "multiprocessing" not in " ".join(other.cmdline())]
    later = seconds[1:] or seconds
    print(file=sys.stderr)
    print(f"{len(seconds)} launches, all ended in order; processes left: {len(left)}.")
    print(f"The first took {seconds[0]:.1f} s, the others {min(later):.2f} to {max(later):.2f} s.")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
