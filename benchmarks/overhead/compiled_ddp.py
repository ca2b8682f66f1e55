"""Steps of a small Llama under ddp, compiled and eager: Equipoise, by hand, Accelerate, and Trainer of transformers.

python benchmarks/overhead/compiled_ddp.py                   the table, about ten minutes
python benchmarks/overhead/compiled_ddp.py --rounds 1        one round
"""

import argparse
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from equipoise import Trainer
from equipoise.parallel.communication.process_group import StoreServer, joined
from equipoise.parallel.communication.rank import Rank
from equipoise.parallel.workers.launch import launch

PROCESSES, TOKENS, LENGTH, BATCH = 2, 256, 32, 8
# Steps before the times count: the first batch, the comparison, and some more.
WARM_UP = 10
# Each row is divided by this one.
REFERENCE = "by hand, eager"
# A wrapper of torch must not go after its process group.
KEPT: list[Any] = []

Batch = dict[str, Tensor]


class Sequences(Dataset[Tensor]):
    """32 random tokens each."""

    def __init__(self, steps: int) -> None:
        draw = torch.Generator().manual_seed(1)
        self.rows = torch.randint(TOKENS, (steps * PROCESSES * BATCH, LENGTH), generator=draw)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Clock:
    """Collates a batch, and notes the time at which it was asked for one."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, rows: list[Tensor]) -> Batch:
        self.times.append(time.perf_counter())
        tokens = torch.stack(rows)
        return {"input_ids": tokens, "labels": tokens}

    def result(self) -> tuple[float, float]:
        """Return the median time of a step in ms, and the seconds of the first ones."""
        steps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        return 1000 * statistics.median(steps[WARM_UP:]), sum(steps[:WARM_UP])


def llama() -> Any:
    """Return a model of four layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=TOKENS, use_cache=False, **sizes))


class Module(L.LightningModule):
    """The model in a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.clock = Clock()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01)


def of_equipoise(steps: int, compiled: bool, strategy: str = "ddp") -> tuple[float, float]:
    trainer = Trainer(
        strategy=strategy,
        devices=["cpu"] * PROCESSES,
        max_epochs=1,
        compile=compiled,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    # One process computes a pipeline, with batches for all devices.
    size = PROCESSES * BATCH if strategy == "pipeline" else BATCH
    trainer.fit(module, DataLoader(Sequences(steps), batch_size=size, collate_fn=module.clock))
    return module.clock.result()


def of_processes(steps: int, train: Callable[[Any, Clock], None]) -> tuple[float, float]:
    """Return the times of a function that trains in each process of a group."""
    store = StoreServer()
    return launch(partial(_in_group, steps, train, store.port), PROCESSES)


def _in_group(steps: int, train: Callable[[Any, Clock], None], port: int, rank: int) -> tuple[float, float]:
    clock = Clock()
    # What torchrun says to its processes.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(PROCESSES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    place = Rank(rank, rank, 0, PROCESSES, PROCESSES)
    with joined(place, torch.device("cpu"), timeout=timedelta(seconds=300), port=port):
        train(Sequences(steps), clock)
    return clock.result()


def by_hand(compiled: bool, data: Any, clock: Clock) -> None:
    """The loop of torch's tutorial, each layer under `torch.compile`."""
    module = llama()
    for layer in module.model.layers if compiled else ():
        layer.compile()
    network = DistributedDataParallel(module)
    KEPT.append(network)
    optimizer = sgd(network)
    sampler: Any = DistributedSampler(data)
    for batch in DataLoader(data, batch_size=BATCH, sampler=sampler, collate_fn=clock):
        optimizer.zero_grad()
        network(**batch)["loss"].backward()
        optimizer.step()


def by_accelerate(regional: bool, data: Any, clock: Clock) -> None:
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=regional)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    assert accelerator.num_processes == PROCESSES
    module = llama()
    loader = DataLoader(data, batch_size=BATCH, collate_fn=clock)
    network, optimizer, loader = accelerator.prepare(module, sgd(module), loader)
    KEPT.append(network)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(network(**batch)["loss"])
        optimizer.step()


def by_transformers(data: Any, clock: Clock) -> None:
    module = llama()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            use_cpu=True,
            torch_compile=True,
            max_grad_norm=0.0,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        assert arguments.world_size == PROCESSES
        optimizer = sgd(module)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        trainer = transformers.Trainer(
            module, arguments, train_dataset=data, data_collator=clock, optimizers=(optimizer, schedule)
        )
        KEPT.append(trainer)
        trainer.train()


WAYS: dict[str, Callable[[int], tuple[float, float]]] = {
    REFERENCE: lambda steps: of_processes(steps, partial(by_hand, False)),
    "by hand, layers compiled": lambda steps: of_processes(steps, partial(by_hand, True)),
    "Equipoise, eager": lambda steps: of_equipoise(steps, compiled=False),
    "Equipoise, compile=True": lambda steps: of_equipoise(steps, compiled=True),
    "Accelerate, model compiled": lambda steps: of_processes(steps, partial(by_accelerate, False)),
    "Accelerate, regional compilation": lambda steps: of_processes(steps, partial(by_accelerate, True)),
    "Trainer of transformers, torch_compile=True": lambda steps: of_processes(steps, by_transformers),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of each run (default: 60)")
    parser.add_argument("--rounds", type=int, default=5, help="shuffled rounds (default: 5)")
    parser.add_argument("--ways", default="", help="a part of the names of ways (default: all)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ways = [way for way in WAYS if options.ways in way or way == REFERENCE]
    steps: dict[str, list[float]] = {way: [] for way in ways}
    begins: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds):
        for way in random.sample(ways, len(ways)):
            step, begin = WAYS[way](options.steps)
            steps[way].append(step)
            begins[way].append(begin)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    print(f"| ddp on 2 CPU devices | step, ms | / {REFERENCE} | first {WARM_UP} steps, s |")
    print("| --- | ---: | ---: | ---: |")
    for way in ways:
        ratios = [own / other for own, other in zip(steps[way], steps[REFERENCE], strict=True)]
        median = statistics.median
        print(f"| {way} | {median(steps[way]):.1f} | {median(ratios):.2f} | {median(begins[way]):.1f} |")


if __name__ == "__main__":
    main()
