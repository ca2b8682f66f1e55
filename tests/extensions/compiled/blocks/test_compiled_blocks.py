"""Compiled blocks compute the same as eager ones, under each strategy that calls blocks as they are."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend, register_backend

from tests.extensions.compiled.blocks.networks import (
    AOT,
    NETWORKS,
    Convolutions,
    Counting,
    CountingBlock,
    Frozen,
    Lengths,
    Plain,
    Tied,
    Whole,
)
from tests.extensions.fsdp.programs import STEP, assert_close, fit, in_processes, weights_of

TOLERANCE = 1e-10
# Networks with the compiler's own kernels. Each takes ten seconds or more, unless its programs are on the disk.
KERNELS: dict[str, Any] = {
    "ddp": (Plain, Frozen, Lengths),
    "fsdp": (Plain, Frozen, Lengths),
    "pipeline": (Plain, Tied, Frozen, Convolutions, Lengths),
}


def trained(kind: Callable[[], Any], strategy: Any, processes: int, **options: Any) -> dict[str, Tensor]:
    """Return the weights after 20 steps."""
    module, _ = fit(kind, strategy, processes, **{"max_epochs": 4, **options})
    return weights_of(module)


def all_trained(kinds: Any, strategy: str) -> list[dict[str, Tensor]]:
    return [trained(kind, strategy, 2, compile=AOT) for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_in_processes_are_those_of_one_device(strategy: str) -> None:
    of_networks = in_processes(2, partial(all_trained, NETWORKS, strategy))
    for kind, weights in zip(NETWORKS, of_networks, strict=True):
        assert_close(trained(kind, "single_device", 1), weights, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [(kind, ("pipeline", "dp")[number % 2]) for number, kind in enumerate(NETWORKS) if kind is not Whole],
)
def test_weights_of_two_devices_in_one_process_are_those_of_one(kind: Callable[[], Any], strategy: str) -> None:
    assert_close(trained(kind, "single_device", 1), trained(kind, strategy, 2, compile=AOT, batch_size=STEP), TOLERANCE)
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "dp"])
def test_the_second_epoch_is_compiled_in_one_process(strategy: str) -> None:
    eager, of_eager = fit(Counting, strategy, 2, count=48)
    compiled, of_compiled = fit(Counting, strategy, 2, count=48, compile=AOT)
    assert_close(weights_of(eager), weights_of(compiled), TOLERANCE)
    assert float(of_eager.callback_metrics["calls"]) > 0
    assert float(of_compiled.callback_metrics["calls"]) == 0
    torch.compiler.reset()


def calls_of(kind: Callable[[], Any], strategy: str) -> tuple[dict[str, Tensor], float]:
    module, trainer = fit(kind, strategy, 2, compile=AOT, max_epochs=1, count=48)
    return weights_of(module), float(trainer.callback_metrics["calls"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_batches_but_the_first_are_compiled(strategy: str) -> None:
    weights, calls = in_processes(2, partial(calls_of, Counting, strategy))
    # 3 blocks in 2 processes, of 4 steps.
    assert calls == 6
    assert_close(trained(Counting, "single_device", 1, max_epochs=1, count=48), weights, TOLERANCE)


class OtherInOneProcess(CountingBlock):
    """Is compiled to something else in the second process."""

    def forward(self, hidden: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            return super().forward(hidden) * 2
        return super().forward(hidden)


class Unequal(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*self.blocks, OtherInOneProcess(), OtherInOneProcess()])


def unequal() -> tuple[dict[str, Tensor], float]:
    if torch.distributed.get_rank():
        return calls_of(Unequal, "ddp")
    with pytest.warns(UserWarning, match=r"blocks.3 and 1 more \(OtherInOneProcess\) stays eager, because a compiled"):
        return calls_of(Unequal, "ddp")


@pytest.mark.slow
def test_all_processes_keep_a_block_eager_that_one_of_them_compiles_to_something_else() -> None:
    weights, calls = in_processes(2, unequal)
    # Of 4 steps in 2 processes: the first of 3 blocks, and all of 2 others.
    assert calls == 6 + 2 * 2 * 4
    assert_close(trained(Unequal, "single_device", 1, max_epochs=1, count=48), weights, TOLERANCE)


# A process that cannot compile, while the others can

COMPILED: list[Any] = []


def fail_after(count: int, graph: Any, inputs: Any) -> Any:
    """Compile a number of graphs in the second process, and any in others."""
    COMPILED.append(graph)
    if torch.distributed.get_rank() == 1 and len(COMPILED) > count:
        raise RuntimeError("no compiler here")
    return lookup_backend("aot_eager")(graph, inputs)


register_backend(partial(fail_after, 0), name="fails_at_once")
register_backend(partial(fail_after, 1), name="fails_later")


def with_backend(kind: Callable[[], Any], strategy: str, name: str, rank: int, warning: str) -> Any:
    """Return weights and rows of the summary; the process of this rank warns."""
    COMPILED.clear()
    warns = pytest.warns(UserWarning, match=warning) if torch.distributed.get_rank() == rank else nullcontext()
    with warns:
        module, trainer = fit(kind, strategy, 2, compile={"backend": name})
    return weights_of(module), trainer.run_state.summary_rows


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("kind", "backend", "rank", "warning", "blocks"),
    [
        (
            Counting,
            "fails_at_once",
            0,
            r"blocks.0 and 2 more \((FSDP)?CountingBlock\) stays eager, because no",
            "",
        ),
        # Another length is compiled anew; the first process does that alone.
        (Lengths, "fails_later", 1, "stays eager in process 1 from now on, because no compiler here", "3, by 1 "),
    ],
)
def test_blocks_stay_eager_where_one_process_cannot_compile(
    kind: Any, backend: str, rank: int, warning: str, blocks: str, strategy: str
) -> None:
    """All processes do at first; later the one that fails computes on alone."""
    weights, rows = in_processes(2, partial(with_backend, kind, strategy, backend, rank, warning))
    found = rows.get("compiled blocks", "")
    assert found.startswith(blocks)
    assert bool(found) == bool(blocks)
    assert_close(trained(kind, "single_device", 1, max_epochs=2), weights, TOLERANCE)


# Checkpoints


def resumed(strategy: str, folder: Path) -> Any:
    """Return the weights of a run that was interrupted, and the names in its checkpoint."""
    saved = folder / f"{strategy}.ckpt"
    _, trainer = fit(Counting, strategy, 2, compile=AOT, max_epochs=1)
    trainer.save_checkpoint(saved)
    module, trainer = fit(Counting, strategy, 2, compile=AOT, ckpt_path=saved, max_epochs=4)
    names = sorted(torch.load(saved, weights_only=False)["state_dict"])
    return weights_of(module), names, trainer.run_state.summary_rows["compiled blocks"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_checkpoints_have_the_names_of_eager_modules_and_are_resumed(strategy: str, tmp_path: Path) -> None:
    weights, names, blocks = in_processes(2, partial(resumed, strategy, tmp_path))
    assert blocks.startswith("3, by ")
    assert names == sorted(Counting().state_dict())
    assert_close(trained(Counting, "single_device", 1), weights, TOLERANCE)
    # The eager module of one device goes on from there, too.
    saved = tmp_path / f"{strategy}.ckpt"
    assert_close(trained(Counting, "single_device", 1, ckpt_path=saved), weights, TOLERANCE)


# The compiler's own kernels


def with_kernels(strategy: str) -> list[dict[str, Tensor]]:
    options: dict[str, Any] = {"batch_size": STEP} if strategy == "pipeline" else {}
    return [trained(kind, strategy, 2, compile=True, **options) for kind in KERNELS[strategy]]


def check_kernels(strategy: str) -> None:
    compute = partial(with_kernels, strategy)
    of_networks = compute() if strategy == "pipeline" else in_processes(2, compute)
    for kind, weights in zip(KERNELS[strategy], of_networks, strict=True):
        assert_close(trained(kind, "single_device", 1), weights, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_kernels_of_the_compiler_in_processes(strategy: str) -> None:
    check_kernels(strategy)


@pytest.mark.slow
def test_kernels_of_the_compiler_in_one_process() -> None:
    # They set a variable of the process's environment.
    command = f"from {__name__} import check_kernels; check_kernels('pipeline')"
    subprocess.run([sys.executable, "-c", command], check=True, timeout=500)


PROGRAM = """
import warnings
from tests.extensions.compiled.blocks.networks import Plain
from tests.extensions.fsdp.programs import fit
warnings.simplefilter("ignore")
_, trainer = fit(Plain, compile={"dynamic": None})
assert trainer.run_state.summary_rows["compiled blocks"] == "3, by 1 programs"
"""


@pytest.mark.slow
def test_a_second_run_takes_the_programs_of_the_first(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    seconds, libraries = [], []
    for _ in range(2):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=300)
        seconds.append(time.perf_counter() - begin)
        libraries.append(sorted(tmp_path.rglob("*.so")))
    assert libraries[0]
    assert libraries[1] == libraries[0]
    # The first run has started a compiler of C++ for each of them.
    assert seconds[1] < seconds[0]
