"""Do networks that were written for one device train as on one where several compute each batch together?"""

import argparse
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.device_mesh.cells import MESHES, cells, on_one_device, processes_of
from benchmarks.device_mesh.networks import NETWORKS


def main() -> None:
    """Train all networks on all meshes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS], help="default: all")
    parser.add_argument("--meshes", nargs="+", choices=[*MESHES], default=[*MESHES], help="default: all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    begin = time.perf_counter()
    # 1. All cells, with as many starts of processes as there are numbers of them.
    expected = {name: on_one_device(name) for name in options.networks}
    meshes_by_processes = defaultdict(list)
    for mesh in options.meshes:
        meshes_by_processes[processes_of(mesh)].append(mesh)
    found: dict[tuple[str, str], str] = {}
    for meshes in meshes_by_processes.values():
        found |= cells(expected, meshes)

    # 2. The table.
    print("| network |", " | ".join(options.meshes), "|\n| --- |", " | ".join("---" for _ in options.meshes), "|")
    for name in options.networks:
        print(f"| {name} |", " | ".join(found[name, mesh] for mesh in options.meshes), "|")
    print(f"\n{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
