"""Does a run end with the same bits, whatever the number of devices that compute it?"""

import argparse
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.virtual_devices.programs import draw, on_one_device, run


def differences(state: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names of what is not equal to the bit."""
    different = sorted(state.keys() ^ expected.keys())
    for name in state.keys() & expected.keys():
        if not torch.equal(torch.as_tensor(state[name]), torch.as_tensor(expected[name])):
            different.append(name)
    return different


def main() -> None:
    """Run programs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--programs", type=int, default=100, help="the number of programs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no program after so many seconds")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    begin = time.perf_counter()
    outcomes: Counter[str] = Counter()
    networks: Counter[str] = Counter()
    verified = 0
    for seed in range(options.first, options.first + options.programs):
        if time.perf_counter() - begin > options.seconds:
            break
        program = draw(seed)
        try:
            different = differences(run(program), run(on_one_device(program)))
            outcome = "different" if different else "equal"
        except Exception:
            outcome, different = "failed", [traceback.format_exc()]
        outcomes[outcome] += 1
        networks[program.network] += 1
        verified += program.verify > 0
        if outcome != "equal":
            print(outcome, program, *different, sep="\n    ", flush=True)
    print("| programs | equal to the bit | different | failed | seconds |\n| --- | --- | --- | --- | --- |")
    figures = [outcomes.total(), outcomes["equal"], outcomes["different"], outcomes["failed"]]
    print("|", " | ".join(map(str, figures)), f"| {time.perf_counter() - begin:.0f} |")
    print(dict(networks), verified, "verified")


if __name__ == "__main__":
    main()
