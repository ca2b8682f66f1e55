"""Compiled blocks compute the same as eager ones, under each strategy that calls blocks as they are."""

import os
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
    Counting,
    CountingBlock,
    Lengths,
    Whole,
)
from tests.extensions.fsdp.programs import STEP, assert_close, fit, in_processes, weights_of
from tests.support.programs import Program

TOLERANCE = 1e-10


def trained(kind: Callable[[], Any], strategy: Any, processes: int, **options: Any) -> dict[str, Tensor]:
    """Return the weights after 10 steps."""
    module, _ = fit(kind, strategy, processes, **options)
    return weights_of(module)


STRATEGIES = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def launched(folder: Path) -> dict[str, dict[str, Any]]:
    """Results of the functions below, by strategy and name, of one launch: each process imports the compiler."""
    return in_processes(2, partial(results, folder))


def results(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for strategy in STRATEGIES:
        calls: dict[str, Callable[[], Any]] = {
            "networks": lambda name=strategy: [trained(kind, name, 2, compile=AOT) for kind in NETWORKS],
            "calls": partial(calls_of, Counting, strategy),
            "unequal": partial(unequal, strategy),
            "without compiler": lambda name=strategy: [with_backend(*case, name) for case in WITHOUT_COMPILER],
            "resumed": partial(resumed, strategy, folder),
        }
        found[strategy] = {}
        for name, call in calls.items():
            torch.compiler.reset()
            found[strategy][name] = call()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_in_processes_are_those_of_one_device(strategy: str, launched: Any) -> None:
    for kind, weights in zip(NETWORKS, launched[strategy]["networks"], strict=True):
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
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_batches_but_the_first_are_compiled(strategy: str, launched: Any) -> None:
    weights, calls = launched[strategy]["calls"]
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


def unequal(strategy: str) -> tuple[dict[str, Tensor], float]:
    if torch.distributed.get_rank():
        return calls_of(Unequal, strategy)
    with pytest.warns(
        UserWarning, match=r"blocks.3 and 1 more \((FSDP)?OtherInOneProcess\) stays eager, because a compiled"
    ):
        return calls_of(Unequal, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_processes_keep_a_block_eager_that_one_of_them_compiles_to_something_else(
    strategy: str, launched: Any
) -> None:
    weights, calls = launched[strategy]["unequal"]
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


# The network, the backend, the rank of the process that warns, and its warning.
WITHOUT_COMPILER = [
    (Counting, "fails_at_once", 0, r"blocks.0 and 2 more \((FSDP)?CountingBlock\) stays eager, because no"),
    # Another length is compiled anew; the first process does that alone.
    (Lengths, "fails_later", 1, "stays eager in process 1 from now on, because no compiler here"),
]


def with_backend(kind: Callable[[], Any], name: str, rank: int, warning: str, strategy: str) -> Any:
    """Return weights and rows of the summary."""
    COMPILED.clear()
    warns = pytest.warns(UserWarning, match=warning) if torch.distributed.get_rank() == rank else nullcontext()
    with warns:
        module, trainer = fit(kind, strategy, 2, compile={"backend": name})
    return weights_of(module), trainer.run_state.summary_rows


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("case", "blocks"), [(0, ""), (1, "3, by 1 ")])
def test_blocks_stay_eager_where_one_process_cannot_compile(
    case: int, blocks: str, strategy: str, launched: Any
) -> None:
    """All processes do at first; later the one that fails computes on alone."""
    weights, rows = launched[strategy]["without compiler"][case]
    found = rows.get("compiled blocks", "")
    assert found.startswith(blocks)
    assert bool(found) == bool(blocks)
    assert_close(trained(WITHOUT_COMPILER[case][0], "single_device", 1), weights, TOLERANCE)


# Checkpoints


def resumed(strategy: str, folder: Path) -> Any:
    """Return the weights of a run that was interrupted, and the names in its checkpoint."""
    saved = folder / f"{strategy}.ckpt"
    _, trainer = fit(Counting, strategy, 2, compile=AOT, max_epochs=1)
    trainer.save_checkpoint(saved)
    module, trainer = fit(Counting, strategy, 2, compile=AOT, ckpt_path=saved)
    names = sorted(torch.load(saved, weights_only=False)["state_dict"])
    return weights_of(module), names, trainer.run_state.summary_rows["compiled blocks"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoints_have_the_names_of_eager_modules_and_are_resumed(
    strategy: str, launched: Any, folder: Path
) -> None:
    weights, names, blocks = launched[strategy]["resumed"]
    assert blocks.startswith("3, by ")
    assert names == sorted(Counting().state_dict())
    assert_close(trained(Counting, "single_device", 1), weights, TOLERANCE)
    # The eager module of one device goes on from there, too.
    saved = folder / f"{strategy}.ckpt"
    assert_close(trained(Counting, "single_device", 1, ckpt_path=saved), weights, TOLERANCE)


# The compiler's own kernels

# Their lengths change, so that sizes become inputs of the program. They set a variable of the process's environment.
PROGRAM = """
from tests.extensions.compiled.blocks.networks import Lengths
from tests.extensions.fsdp.programs import assert_close, fit, weights_of
compiled, trainer = fit(Lengths, compile={"dynamic": None})
assert trainer.run_state.summary_rows["compiled blocks"].startswith("3, by ")
assert_close(weights_of(fit(Lengths)[0]), weights_of(compiled), 1e-10)
"""


@pytest.mark.slow
def test_kernels_of_the_compiler_compute_the_same_and_a_second_run_takes_those_of_the_first(tmp_path: Path) -> None:
    libraries = []
    for _ in range(2):
        with Program(PROGRAM, environment={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}) as program:
            _, complaints = program.finish()
            assert program.returncode == 0, complaints
        libraries.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")})
    assert libraries[0]
    # None was compiled again.
    assert libraries[1] == libraries[0]
