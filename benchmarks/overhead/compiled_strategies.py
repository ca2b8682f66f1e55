"""Steps of a small Llama under ddp, fsdp and pipeline: compiled blocks beside the eager ones of the same strategy.

python benchmarks/overhead/compiled_strategies.py                three rounds, about three minutes
python benchmarks/overhead/compiled_strategies.py --rounds 1     one round
"""

import argparse
import logging
import statistics
import sys
import warnings

import torch
from compiled_ddp import PROCESSES, WARM_UP, of_equipoise

STRATEGIES = ("ddp", "fsdp", "pipeline")

Times = tuple[float, float]


def table(results: dict[str, list[tuple[Times, Times]]]) -> list[str]:
    """Return the lines of the table.

    Args:
        results: For each strategy, the times of the eager and of the compiled run of each round.
    """
    lines = [
        f"| {PROCESSES} CPU devices | eager, ms | compiled, ms | compiled / eager | first {WARM_UP} steps, s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for strategy, rounds in results.items():
        eager = statistics.median(step for (step, _), _ in rounds)
        compiled = statistics.median(step for _, (step, _) in rounds)
        ratio = statistics.median(own / other for (other, _), (own, _) in rounds)
        begin = statistics.median(begin for _, (_, begin) in rounds)
        lines.append(f"| {strategy} | {eager:.1f} | {compiled:.1f} | {ratio:.2f} | {begin:.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of each run (default: 60)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    results: dict[str, list[tuple[Times, Times]]] = {strategy: [] for strategy in STRATEGIES}
    for number in range(options.rounds):
        for strategy in STRATEGIES:
            eager = of_equipoise(options.steps, False, strategy)
            compiled = of_equipoise(options.steps, True, strategy)
            results[strategy].append((eager, compiled))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
