"""Distance of a pipeline from its ideal, and quality of automatic cuts; see README.md."""

import argparse
import logging
import platform
import sys
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from cuts import cut_network
from networks import PyramidNet, Transformer, count
from rich.console import Console
from rich.table import Table
from sleeping import Sleeper, step_seconds

from equipoise import PipelineStrategy
from equipoise.extensions.pipeline.schedule.schedule import SCHEDULES, check_schedule, check_stages
from equipoise.extensions.pipeline.schedule.simulation import simulate

MOST_BEYOND_THEORY, MOST_TO_MEAN, MOST_TO_BEST, LEAST_GAIN = 0.08, 1.10, 1.02, 1.4
"""The bounds: time lost beyond theory, the slowest stage by the mean and by the best cut's, gain on unequal devices."""

FORWARD, BACKWARD = 0.03, 0.045  # seconds of a stage for one micro-batch


def schedules(
    names: list[str], engines: list[str], steps: int, devices: list[int], micro_batches: list[int]
) -> tuple[Table, list[str]]:
    """Lost time of stages of known duration."""
    table = Table(
        *("engine", "schedule", "devices", "stages", "micro-batches", "step, ms", "lost", "in theory", "beyond"),
        title="Lost time, share",
    )
    broken = []
    for engine, schedule, p, m in product(engines, map(check_schedule, names), devices, micro_batches):
        v = check_stages(schedule, None)
        cut = [f"net.{stage}" for stage in range(1, p * v)]
        threads = True if engine == "threads" else None  # one for each device though all are the CPU
        strategy = PipelineStrategy(engine=engine, micro_batches=m, schedule=schedule, cut_before=cut, threads=threads)
        module = Sleeper(p * v, FORWARD, BACKWARD, [1.0] * p)
        seconds, lost = step_seconds(module, strategy, p, m, steps)
        theory = simulate(schedule, [FORWARD] * p * v, [BACKWARD] * p * v, m, v).idle
        cells = (f"{seconds * 1e3:.0f}", f"{lost:.1%}", f"{theory:.1%}", f"{lost - theory:+.1%}")
        table.add_row(engine, schedule, str(p), str(p * v), str(m), *cells)
        promised = (p - 1) / (m + p - 1) + MOST_BEYOND_THEORY  # whatever a schedule with less waiting may do in theory
        if lost > promised:
            where = f"{engine}, {schedule}, {p} devices, {m} micro-batches"
            broken.append(f"{where}: {lost:.1%} lost, more than {promised:.1%}")
    return table, broken


def replicas(steps: int, devices: list[int], micro_batches: list[int]) -> tuple[Table, list[str]]:
    """Lost time of two replicas, which exchange their gradients at the end of every step."""
    columns = ("replicas", "devices of each", "micro-batches", "step, ms", "lost", "in theory", "beyond")
    table = Table(*columns, title="Lost time of two replicas under 1f1b, share")
    broken = []
    for p, m in product(devices, micro_batches):
        cut = [f"net.{stage}" for stage in range(1, p)]
        strategy = PipelineStrategy(engine="processes", micro_batches=m, cut_before=cut, replicas=2)
        seconds, lost = step_seconds(Sleeper(p, FORWARD, BACKWARD, [1.0] * p), strategy, 2 * p, m, steps)
        theory = simulate("1f1b", [FORWARD] * p, [BACKWARD] * p, m, 1).idle
        table.add_row(
            "2", str(p), str(m), f"{seconds * 1e3:.0f}", f"{lost:.1%}", f"{theory:.1%}", f"{lost - theory:+.1%}"
        )
        if lost - theory > MOST_BEYOND_THEORY:
            broken.append(f"2 replicas of {p} devices, {m} micro-batches: {lost - theory:.1%} beyond theory")
    return table, broken


def cuts(small: bool, rounds: int) -> tuple[list[Table], list[str]]:
    """Automatic cuts beside the best."""
    table = Table(
        *("network", "stages", "cut before", "slowest / mean", "best / mean", "slowest / best", "as stages ran"),
        title="Automatic cuts, one micro-batch of 2 samples",
    )
    cost = Table(
        *("network", "parameters", "calls", "its step, s", "measuring, s", "choosing for 2, 3, 4, ms"),
        title="What measuring and choosing take",
    )
    broken = []
    words = 1000 if small else 20_000
    networks = {
        "transformer": (Transformer(6, 64, words) if small else Transformer(), torch.randint(words, (2, 64))),
        "PyramidNet": (PyramidNet(3, 48) if small else PyramidNet(), torch.randn(2, 3, 32, 32)),
    }
    for name, (network, batch) in networks.items():
        measured = cut_network(network, batch, (2, 3, 4), rounds)
        for found in measured.found:
            ratios = (found.to_mean, found.best_to_mean, found.to_best, found.ran)
            table.add_row(name, str(found.stages), ", ".join(found.begins), *(f"{ratio:.3f}" for ratio in ratios))
            if found.to_best > MOST_TO_BEST:
                broken.append(f"{name}, {found.stages} stages: {found.to_best:.3f} times the best cut")
            if found.to_mean > max(MOST_TO_MEAN, MOST_TO_BEST * found.best_to_mean):
                broken.append(f"{name}, {found.stages} stages: the slowest takes {found.to_mean:.3f} times the mean")
        choosing = ", ".join(f"{found.choosing * 1e3:.0f}" for found in measured.found)
        cells = (f"{count(network):,}", f"{measured.calls:,}", f"{measured.step:.2f}", f"{measured.seconds:.2f}")
        cost.add_row(name, *cells, choosing)
    return [table, cost], broken


def unequal(steps: int) -> tuple[Table, list[str]]:
    """Two devices, the second three times slower."""
    layers, seconds, m = 12, 0.004, 8
    table = Table("cut", "step, ms", "throughput", title="A device three times slower")
    ways = {"equal": {"cut_before": [f"net.{layers // 2}"]}, "automatic, speeds=[3, 1]": {"speeds": [3, 1]}}
    first, gain = 0.0, 0.0
    for name, options in ways.items():
        strategy = PipelineStrategy(micro_batches=m, threads=True, **options)
        taken = step_seconds(Sleeper(layers, seconds, seconds, [1.0, 3.0]), strategy, 2, m, steps).seconds
        first = first or taken
        gain = first / taken
        cut = strategy.portable.strategy_state()["cut_before"][0]
        table.add_row(f"{name}: before {cut}", f"{taken * 1e3:.0f}", f"{gain:.2f}")
    return table, [f"unequal devices: {gain:.2f} times the throughput"] if gain < LEAST_GAIN else []


def arguments(command: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="steps of sleeping stages (default: 5)")
    parser.add_argument("--rounds", type=int, default=7, help="how often cut stages run (default: 7)")
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES), help="of sleeping stages (default: all)")
    parser.add_argument(
        "--engines", nargs="+", default=["threads", "processes"], help="of sleeping stages (default: threads processes)"
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4], help="of sleeping stages (default: 2 4)")
    parser.add_argument("--replica-devices", type=int, nargs="*", default=[2, 3], help="of each replica (default: 2 3)")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8], help="(default: 1 2 4 8)")
    parser.add_argument("--only-schedules", action="store_true", help="lost time alone")
    parser.add_argument("--small", action="store_true", help="cut small networks")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is broken")
    parser.add_argument("--markdown", type=Path, help="write the tables for the README into this file")
    return parser.parse_args(command)


def measure(options: argparse.Namespace) -> Iterator[tuple[list[Table], list[str]]]:
    """Everything, one after another."""
    names, engines = options.schedules, options.engines
    lost, broken = schedules(names, engines, options.steps, options.devices, options.micro_batches)
    yield [lost], broken
    lost, broken = replicas(options.steps, options.replica_devices, options.micro_batches)
    yield [lost], broken
    if options.only_schedules:
        return
    yield cuts(options.small, options.rounds)
    gain, broken = unequal(options.steps)
    yield [gain], broken


def main(command: list[str] | None = None) -> int:
    options, console = arguments(command), Console(width=120)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "equipoise"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tables: list[Table] = []
    broken: list[str] = []
    for made, wrong in measure(options):
        tables, broken = tables + made, broken + wrong
        for table in made:
            console.print(table)
    console.print(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, 1 thread")
    for sentence in broken:
        console.print(f"Bound broken: {sentence}.")
    if not broken:
        console.print("All bounds are kept.")
    if options.markdown is not None:
        options.markdown.write_text("\n".join(map(markdown, tables)))
    return int(bool(broken)) if options.check else 0


def markdown(table: Table) -> str:
    columns = [list(column.cells) for column in table.columns]
    lines = [[str(column.header) for column in table.columns], ["---"] * len(columns), *zip(*columns, strict=True)]
    return f"{table.title}:\n\n" + "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
