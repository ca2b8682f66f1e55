"""The sentence that names what limits a run, with a remedy. A healthy run has none."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from equipoise.extensions.timing.parts import (
    CALLBACK,
    CHECKPOINTS,
    COPYING,
    DATA,
    EXCHANGE,
    LOGGERS,
    MODULE_HOOKS,
    VALIDATION,
)
from equipoise.extensions.timing.run_times import RunTimes

__all__ = ["Facts", "describe_limit"]

# Without a part of this share, a run would be 1.25 times as fast. Less is not worth a change.
_LEAST_SHARE = 0.2
# A remedy is for such a share.
_GOOD_SHARE = 0.1
# Processes differ by some percent on machines that are alike.
_LEAST_WAITING = 0.1
# Shorter runs are over before a sentence helps, and their times are chance.
_LEAST_SECONDS = 1.0
_LEAST_STEPS = 20
# A step of a small network calls about a hundred operations, of 2 to 5 µs each however little they compute.
_CALLS_SECONDS = 0.0005
# A batch of this size fills such operations.
_LARGE_BATCH = 256
# More workers are rarely of use for one process.
_MOST_WORKERS = 8


@dataclass(frozen=True)
class Facts:
    """Facts on which remedies depend.

    Attributes:
        num_workers: Workers of the training loader; None if it is no DataLoader.
        batch_size: Samples of its batches; None if unknown.
        processors: Processors of this machine for this process.
        log_every_n_steps: Steps between two writings to loggers.
        validations: Number of validations.
        epoch_steps: Steps of an epoch; infinite if unknown.
        compiles: Whether steps are compiled or captured.
    """

    num_workers: int | None = None
    batch_size: int | None = None
    processors: int = 1
    log_every_n_steps: int = 50
    validations: int = 0
    epoch_steps: float = math.inf
    compiles: bool = False


def describe_limit(times: RunTimes, facts: Facts) -> str | None:
    """Return a sentence about the part that limits a run most; None if nothing does, or the run was short."""
    if times.seconds < _LEAST_SECONDS or times.steps < _LEAST_STEPS:
        return None
    short_steps = _about_short_steps(times, facts)
    limits = [(share, text) for share, text in _limits(times, facts) if share >= _LEAST_SHARE]
    # A worker takes longer to hand over a batch than such a step takes.
    if short_steps is not None:
        limits = [(share, text) for share, text in limits if "num_workers" not in text]
    if limits:
        return max(limits)[1]
    if times.waiting_share() >= _LEAST_WAITING:
        return _about_processes(times)
    return short_steps


def _limits(times: RunTimes, facts: Facts) -> Iterator[tuple[float, str]]:
    """Yield the share and the sentence of each part that could be smaller."""
    for name, share in times.shares().items():
        percent = f"{share:.0%}"
        if name == DATA:
            yield share, f"{percent} of the time is spent waiting for data: {_about_workers(facts)}"
        elif name == COPYING:
            yield share, f"copying batches to the device takes {percent} of the time: try pin_memory=True in the loader"
        elif name.startswith(CALLBACK):
            yield share, f"the {name} takes {percent} of the time: let it do less, or act in fewer steps"
        elif name == MODULE_HOOKS:
            yield share, f"hooks of the module take {percent} of the time: let them do less, or act in fewer steps"
        elif name == LOGGERS:
            every = 10 * facts.log_every_n_steps
            yield share, f"writing to loggers takes {percent} of the time: try log_every_n_steps={every}"
        elif name == CHECKPOINTS:
            yield share, f"saving checkpoints takes {percent} of the time: save {_factor(share)} times less often"
        elif name == VALIDATION and facts.validations:
            yield share, _about_validation(times, facts, share)
        elif name == EXCHANGE and share > 2 * times.waiting_share():
            yield share, f"exchanging gradients takes {percent} of the time: try accumulate_grad_batches=4"


def _about_workers(facts: Facts) -> str:
    if facts.num_workers is None:
        return "let the loader read ahead, as a DataLoader with num_workers does"
    most = max(2, min(_MOST_WORKERS, facts.processors))
    if facts.num_workers < most:
        return f"the loader has num_workers={facts.num_workers}: try num_workers={most}"
    return f"the loader has num_workers={facts.num_workers}: prepare the samples once, before training"


def _about_validation(times: RunTimes, facts: Facts, share: float) -> str:
    steps = math.ceil(times.steps / facts.validations)
    enough = steps * _factor(share)
    if enough < facts.epoch_steps:
        remedy = f"val_check_interval={enough}"
    else:
        remedy = f"val_check_interval=1.0 and check_val_every_n_epoch={math.ceil(enough / facts.epoch_steps)}"
    return f"validation every {steps:,} steps takes {share:.0%} of the time: try {remedy}"


def _factor(share: float) -> int:
    """Return how many times less often something must happen to take a good share of the time."""
    return math.ceil(share / (1 - share) * (1 - _GOOD_SHARE) / _GOOD_SHARE)


def _about_processes(times: RunTimes) -> str:
    longest = max(times.ranks)
    slowest = times.ranks.index(longest)
    waiting = times.waiting_share() * times.seconds
    more = longest / (longest - waiting) - 1
    return (
        f"rank {slowest} is {more:.0%} slower than the others, which wait {times.waiting_share():.0%} of the time for"
        " it: give it fewer samples, as strategy=ddp with shares='auto' does, or look for other work on its device"
    )


def _about_short_steps(times: RunTimes, facts: Facts) -> str | None:
    seconds = times.step_seconds()
    if seconds >= _CALLS_SECONDS or facts.compiles:
        return None
    if facts.batch_size is None or facts.batch_size >= _LARGE_BATCH:
        return None
    return (
        f"a step takes {1e6 * seconds:.0f} µs, mostly for calls of operations that compute little: try a larger"
        f" batch_size than {facts.batch_size}, or compile=True"
    )
