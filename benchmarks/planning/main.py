"""Predicted peaks against those of real steps, and the time of plans of large models.

python benchmarks/planning/main.py                   the tables
python benchmarks/planning/main.py --quick           one batch size for all variants but the first; no large models
python benchmarks/planning/main.py --only unet gru   these networks
python benchmarks/planning/main.py --large           the large models alone
python benchmarks/planning/main.py --libraries       models of transformers and timm alone
python benchmarks/planning/main.py --largest         the largest batches within limits alone, against real steps
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# First, since it completes a torchvision that other packages would fail to import.
from library_models import LibraryTask, Model, absence, library_models, single_precision

# isort: split

import torch
from large_models import LARGE
from lightning.pytorch import LightningModule
from networks import NETWORKS, Trained
from rich.console import Console
from rich.table import Table
from torch import nn

from equipoise.extensions.planning.description.settings import StepSettings
from equipoise.extensions.planning.tracing.recording import record_step
from equipoise.extensions.planning.tracing.step import PlannedStep
from equipoise.extensions.planning.tracing.tracer import trace_step
from equipoise.formats import format_bytes, format_duration

# Each network with all of these. "blocks" stands for the parts of the network that have several layers, or all.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("adamw", {}),
    "SGD with momentum": ("momentum", {}),
    "two optimisers, by hand": ("two", {}),
    "RMSprop, bf16-mixed": ("rmsprop", {"precision": "bf16-mixed"}),
    "AdamW, bf16-mixed, 2 accumulated": ("adamw", {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    "AdamW, 3 accumulated": ("adamw", {"accumulate_grad_batches": 3}),
    "AdamW, checkpointed": ("adamw", {"activation_checkpointing": "blocks"}),
    "SGD, bf16-mixed, checkpointed": (
        "momentum",
        {"precision": "bf16-mixed", "activation_checkpointing": "blocks"},
    ),
}
# Each model of a library with all of these.
LIBRARY_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("adamw", {}),
    "SGD with momentum, bf16-mixed": ("momentum", {"precision": "bf16-mixed"}),
}
LARGEST_BATCH = 200
# Batch sizes of each network and variant: the smallest, the largest, and some in between.
SIZES = 3


class Case(NamedTuple):
    """A step of a real network, and its prediction."""

    network: str
    variant: str
    batch_size: int
    actual: int
    predicted: int

    @property
    def error(self) -> float:
        return self.predicted / self.actual - 1


def settings_of(net: nn.Module, options: dict[str, Any]) -> StepSettings:
    """Return the settings of a variant; the blocks of a network are its children with several layers, or else all."""
    options = dict(options)
    if options.get("activation_checkpointing"):
        children = list(net.named_children())
        blocks = [name for name, child in children if len(list(child.modules())) > 2]
        blocks = blocks or [name for name, child in children if any(True for _ in child.parameters())]
        lists = [name for name in blocks if isinstance(net.get_submodule(name), nn.ModuleList)]
        options["activation_checkpointing"] = tuple(f"net.{name}{'.*' if name in lists else ''}" for name in blocks)
    return StepSettings(**options)


def really(name: str, optimizer: str, settings: StepSettings, batch_size: int) -> int:
    """Return the peak of a real step, as the ledger records it."""
    build, example = NETWORKS[name]
    return peak_of(Trained(build(), optimizer), example(), settings, batch_size)


def peak_of(module: LightningModule, example: Any, settings: StepSettings, batch_size: int) -> int:
    """Return the peak of a real step of a module, as the ledger records it."""
    step = PlannedStep(module, settings)
    recorded = record_step(step, example, batch_size, settings.accumulate_grad_batches)
    running = most = 0
    for event in recorded.events:
        nbytes = recorded.holders[abs(event) - 1].nbytes
        running += nbytes if event > 0 else -nbytes
        most = max(most, running)
    return most


def cases_of(name: str, generator: random.Random, *, quick: bool) -> Iterator[Case]:
    """Yield the steps of a network under all variants, at several batch sizes."""
    build, example = NETWORKS[name]
    for number, (variant, (optimizer, options)) in enumerate(VARIANTS.items()):
        settings = settings_of(build(), options)
        found = trace_step(lambda optimizer=optimizer: Trained(build(), optimizer), example(), settings)
        if found.method != "traced":
            print(f"{name}, {variant}: {found.method}", file=sys.stderr)
        batch_sizes = [1, LARGEST_BATCH, *generator.sample(range(2, LARGEST_BATCH), SIZES - 2)]
        if quick and number:
            batch_sizes = batch_sizes[-1:]
        for batch_size in batch_sizes:
            # Statistics of a batch need two samples.
            batch_size = max(2, batch_size) if has_statistics(build()) else batch_size
            actual = really(name, optimizer, settings, batch_size)
            yield Case(name, variant, batch_size, actual, found.peak(batch_size).nbytes)


def has_statistics(net: nn.Module) -> bool:
    return any(isinstance(module, nn.BatchNorm1d) for module in net.modules())


def accuracy(only: list[str] | None, seed: int, console: Console, *, quick: bool) -> None:
    """Print the errors of each network, and of each variant."""
    generator = random.Random(seed)
    cases: list[Case] = []
    for name in NETWORKS:
        if only is None or name in only:
            of_network = list(cases_of(name, generator, quick=quick))
            cases += of_network
            print(name, *summary(of_network), sep=" | ", file=sys.stderr, flush=True)
    for head in ("network", "variant"):
        groups: dict[str, list[Case]] = defaultdict(list)
        for case in cases:
            groups[getattr(case, head)].append(case)
        table = Table(head, "steps", "median error", "largest error")
        for name, group in [*groups.items(), ("all", cases)]:
            table.add_row(name, *summary(group))
        console.print(table)
    for case in sorted(cases, key=lambda case: -abs(case.error))[:5]:
        print(f"{case.error:+.3%}  {case.network}, {case.variant}, {case.batch_size} samples", file=sys.stderr)


def libraries(seed: int, console: Console) -> None:
    """Print the errors of models of libraries."""
    generator = random.Random(seed)
    cases: list[Case] = []
    for model in library_models():
        of_model = []
        try:
            for variant, (optimizer, options) in LIBRARY_VARIANTS.items():
                of_model.append(library_case(model, variant, optimizer, options, generator))
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            print(f"{model.library}, {model.name}: {type(error).__name__}: {first_line}", file=sys.stderr, flush=True)
            continue
        cases += of_model
        print(model.library, model.name, *summary(of_model), sep=" | ", file=sys.stderr, flush=True)
    table = Table("variant", "steps", "median error", "largest error")
    for variant in LIBRARY_VARIANTS:
        table.add_row(variant, *summary([case for case in cases if case.variant == variant]))
    table.add_row("all", *summary(cases))
    console.print(table)


def library_case(model: Model, variant: str, optimizer: str, options: dict[str, Any], generator: random.Random) -> Case:
    """Return a step of a model of a library, with a random batch size."""
    settings = StepSettings(**options)
    example = single_precision(model.batch(4, torch.Generator().manual_seed(0)))
    batch_size = generator.randint(2, 12)
    found = trace_step(lambda: LibraryTask(model.make(), model, optimizer), example, settings)
    if found.method != "traced":
        print(f"{model.name}, {variant}: {found.method}", file=sys.stderr)
    actual = peak_of(LibraryTask(model.make(), model, optimizer), example, settings, batch_size)
    return Case(model.name, variant, batch_size, actual, found.peak(batch_size).nbytes)


def largest_batches(only: list[str] | None, seed: int, console: Console) -> None:
    """Print for each network the largest batch within a random limit, and what real steps around it need."""
    generator = random.Random(seed)
    table = Table("network", "limit", "largest batch", "its peak", "peak with one more", "right within one")
    for name in NETWORKS:
        if only is not None and name not in only:
            continue
        build, example = NETWORKS[name]
        found = trace_step(lambda build=build: Trained(build(), "adamw"), example(), StepSettings())
        limit = found.peak(generator.randint(3, LARGEST_BATCH)).nbytes + generator.randint(0, 50_000)
        largest = found.largest_batch(limit)
        peaks = [really(name, "adamw", StepSettings(), size) for size in range(largest - 1, largest + 3)]
        # One sample fewer fits, and two more do not.
        is_right = peaks[0] <= limit < peaks[3]
        cells = (f"{limit:,}", str(largest), f"{peaks[1]:,}", f"{peaks[2]:,}", "yes" if is_right else "NO")
        table.add_row(name, *cells)
        print(name, *cells, sep=" | ", file=sys.stderr, flush=True)
    console.print(table)


def processor_seconds() -> float:
    """Return the time that the processor has spent on this process and on those that it has started."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def summary(cases: list[Case]) -> tuple[str, str, str]:
    """Return the number of cases, their median error, and the largest one."""
    median = statistics.median(abs(case.error) for case in cases)
    largest = max((case.error for case in cases), key=abs)
    return str(len(cases)), f"{median:.3%}", f"{largest:+.3%}"


def large_models(console: Console) -> None:
    """Print time and memory of the plans of large models, each by the whole command in a process of its own."""
    table = Table(
        *("model", "parameters", "plan", "processor time"),
        *("peak with 1 sample", "largest batch in 80 GiB", "resident set"),
    )
    for name in LARGE:
        if name.endswith("of transformers") and absence("transformers"):
            print(f"skipped: {absence('transformers')}", file=sys.stderr)
            continue
        begin = time.perf_counter()
        busy = processor_seconds()
        # What `/usr/bin/time` would measure: the largest of the command and the processes that it starts.
        plan, resident = planned(name)
        seconds = time.perf_counter() - begin
        (one_device,) = [entry for entry in plan["strategies"] if entry["strategy"] == "single_device"]
        (device,) = one_device["devices"]
        cells = (
            format_bytes(device["peak"]["parts"]["parameter"]),
            format_duration(seconds),
            format_duration(processor_seconds() - busy),
            format_bytes(device["peak"]["nbytes"]),
            str(one_device["largest_batch"]),
            format_bytes(resident),
        )
        table.add_row(name, *cells)
        print(name, *cells, sep=" | ", file=sys.stderr, flush=True)
    console.print(table)


def planned(name: str) -> tuple[dict[str, Any], int]:
    """Return the plan of a large model on four GPUs, and the largest resident set of the command in bytes."""
    command = [sys.executable, str(Path(__file__).with_name("measured_command.py"))]
    command += ["plan", "--config-dir", str(Path(__file__).with_name("conf")), "--json"]
    command += [f"module.name='{name}'", "trainer.devices=4x80GiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    *_, resident = done.stderr.split()
    return json.loads(done.stdout), int(resident)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(NETWORKS), nargs="+", help="these networks")
    parser.add_argument("--quick", action="store_true", help="one batch size for all variants but the first")
    parser.add_argument("--large", action="store_true", help="the large models alone")
    parser.add_argument("--libraries", action="store_true", help="models of transformers and timm alone")
    parser.add_argument("--largest", action="store_true", help="the largest batches within limits alone")
    parser.add_argument("--seed", type=int, default=0, help="seed of the batch sizes")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(arguments.seed)
    console = Console(width=140)
    if arguments.libraries:
        libraries(arguments.seed, console)
        return
    if arguments.largest:
        largest_batches(arguments.only, arguments.seed, console)
        return
    if not arguments.large:
        accuracy(arguments.only, arguments.seed, console, quick=arguments.quick)
    if arguments.large or not (arguments.only or arguments.quick):
        large_models(console)


if __name__ == "__main__":
    sys.exit(main())
