"""The sentence that names what limits a run, with a remedy. A healthy run has none."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from equipoise.extensions.timing.parts import (
    CALLBACK,
    CHECKPOINTS,
    COMPUTATION,
    COPYING,
    DATA,
    EXCHANGE,
    FORWARD,
    LOGGERS,
    MODULE_HOOKS,
    STEP,
    VALIDATION,
)
from equipoise.extensions.timing.run_times import RunTimes

__all__ = [
    "LEAST_SHARE",
    "PAUSES",
    "READS",
    "SHORT_STEPS",
    "SLOW_PROCESS",
    "Facts",
    "Limit",
    "find_limit",
    "times_less_often",
]

# What limits a run besides the parts of a step.
PAUSES = "pauses of training_step"
READS = "reads of numbers"
SHORT_STEPS = "short steps"
SLOW_PROCESS = "a slow process"

# Without a part of this share, a run would be 1.25 times as fast. Less is not worth a change.
LEAST_SHARE = 0.2
# An optimiser has work in each step; it takes less than the forward and backward of all but tiny batches.
_LARGE_OPTIMIZER = 0.5
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
# A step may log its loss as a number. On a GPU each read waits until all operations before it are done.
_MANY_READS = 20
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
        val_interval: Steps between two of them; None if that changes.
        epoch_steps: Steps of an epoch; infinite if unknown.
        compiles: Whether steps are compiled or captured.
        pauses: Seconds of a training step between operations of torch; see `HostWork`.
        reads: Numbers of tensors that a training step reads.
    """

    num_workers: int | None = None
    batch_size: int | None = None
    processors: int = 1
    log_every_n_steps: int = 50
    validations: int = 0
    val_interval: int | None = None
    epoch_steps: float = math.inf
    compiles: bool = False
    pauses: float = 0.0
    reads: int = 0


@dataclass(frozen=True)
class Limit:
    """The part that limits a run.

    Attributes:
        part: Its name among the parts of the times, `SHORT_STEPS` or `SLOW_PROCESS`.
        share: Its share of the time.
        statement: A phrase that says what takes this share.
        remedy: The remedy, as a phrase.
        settings: Arguments of the trainer that are the remedy, if it is one of these alone. Default: none.
    """

    part: str
    share: float
    statement: str
    remedy: str
    settings: dict[str, int | float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the sentence."""
        return f"{self.statement}: {self.remedy}"


def find_limit(times: RunTimes, facts: Facts) -> Limit | None:
    """Return the part that limits a run most; None if nothing does, or the run was short."""
    if times.seconds < _LEAST_SECONDS or times.steps < _LEAST_STEPS:
        return None
    short_steps = _short_steps(times, facts)
    limits = [limit for limit in _limits(times, facts) if limit.share >= LEAST_SHARE]
    # A worker takes longer to hand over a batch than such a step takes, and an optimiser consists of such calls.
    if short_steps is not None:
        limits = [limit for limit in limits if limit.part not in (DATA, STEP)]
    if limits:
        return max(limits, key=lambda limit: limit.share)
    if times.waiting_share() >= _LEAST_WAITING:
        return _slow_process(times)
    if facts.reads >= _MANY_READS:
        return Limit(
            READS,
            1.0,
            f"`training_step` reads {facts.reads} numbers of tensors, as `.item()` and `if tensor:` do, and on a GPU"
            " each of them waits for all operations before it",
            "compute with the tensors, and read one that holds all results, or hand tensors to `self.log`",
        )
    return short_steps


def _limits(times: RunTimes, facts: Facts) -> Iterator[Limit]:
    """Yield each part that could be smaller."""
    # Reads are named first: between them are short pauses.
    if facts.pauses and facts.reads < _MANY_READS:
        yield _pauses(times, facts)
    for name, share in times.shares().items():
        taken = f"takes {share:.0%} of the time"
        if name == DATA:
            statement = f"{share:.0%} of the time is spent waiting for data"
            yield Limit(name, share, statement, _about_workers(facts))
        elif name == COPYING:
            yield Limit(name, share, f"copying batches to the device {taken}", "try pin_memory=True in the loader")
        elif name.startswith(CALLBACK):
            yield Limit(name, share, f"the {name} {taken}", "let it do less, or act in fewer steps")
        elif name == MODULE_HOOKS:
            statement = f"hooks of the module take {share:.0%} of the time"
            yield Limit(name, share, statement, "let them do less, or act in fewer steps")
        elif name == LOGGERS:
            every = 10 * facts.log_every_n_steps
            yield _tried(name, share, f"writing to loggers {taken}", log_every_n_steps=every)
        elif name == CHECKPOINTS:
            remedy = f"save {times_less_often(share)} times less often"
            yield Limit(name, share, f"saving checkpoints {taken}", remedy)
        elif name == VALIDATION and facts.validations:
            yield _validation(times, facts, share)
        elif name == STEP and share >= _LARGE_OPTIMIZER:
            remedy = "try fused=True in its constructor, or fewer and larger steps: a larger batch_size"
            yield Limit(name, share, f"the optimiser {taken}", remedy)
        elif name == EXCHANGE and share > 2 * times.waiting_share():
            yield _tried(name, share, f"exchanging gradients {taken}", accumulate_grad_batches=4)


def _tried(part: str, share: float, statement: str, **settings: int | float) -> Limit:
    """Return a limit whose remedy is arguments of the trainer."""
    texts = [f"{name}={value}" for name, value in settings.items()]
    return Limit(part, share, statement, f"try {' and '.join(texts)}", settings)


def _about_workers(facts: Facts) -> str:
    if facts.num_workers is None:
        return "let the loader read ahead, as a DataLoader with num_workers does"
    most = max(2, min(_MOST_WORKERS, facts.processors))
    if facts.num_workers < most:
        return f"the loader has num_workers={facts.num_workers}: try num_workers={most}"
    return f"the loader has num_workers={facts.num_workers}: prepare the samples once, before training"


def _validation(times: RunTimes, facts: Facts, share: float) -> Limit:
    # The measured steps lack the first ones.
    steps = facts.val_interval or math.ceil(times.steps / facts.validations)
    enough = steps * times_less_often(share)
    settings: dict[str, int | float] = {"val_check_interval": enough}
    if enough >= facts.epoch_steps:
        settings = {"val_check_interval": 1.0, "check_val_every_n_epoch": math.ceil(enough / facts.epoch_steps)}
    statement = f"validation every {steps:,} steps takes {share:.0%} of the time"
    return _tried(VALIDATION, share, statement, **settings)


def _pauses(times: RunTimes, facts: Facts) -> Limit:
    # The steps that were watched may have been slower than others.
    forward = times.parts.get(FORWARD, times.parts.get(COMPUTATION, 0.0))
    share = min(facts.pauses * times.steps, forward) / times.seconds
    return Limit(
        PAUSES,
        share,
        f"{share:.0%} of the time passes in `training_step` between operations of torch, in other Python code",
        "do this work in the data set, whose workers run beside the training, or in fewer steps",
    )


def times_less_often(share: float) -> int:
    """Return how many times less often something must happen to take a good share of the time.

    Example:
        >>> times_less_often(0.5)
        9
    """
    return math.ceil(share / (1 - share) * (1 - _GOOD_SHARE) / _GOOD_SHARE)


def _slow_process(times: RunTimes) -> Limit:
    longest = max(times.ranks)
    slowest = times.ranks.index(longest)
    share = times.waiting_share()
    more = longest / (longest - share * times.seconds) - 1
    return Limit(
        SLOW_PROCESS,
        share,
        f"rank {slowest} is {more:.0%} slower than the others, which wait {share:.0%} of the time for it",
        "give it fewer samples, as strategy=ddp with shares='auto' does, or look for other work on its device",
    )


def _short_steps(times: RunTimes, facts: Facts) -> Limit | None:
    seconds = times.step_seconds()
    if seconds >= _CALLS_SECONDS or facts.compiles:
        return None
    if facts.batch_size is None or facts.batch_size >= _LARGE_BATCH:
        return None
    return Limit(
        SHORT_STEPS,
        1.0,
        f"a step takes {1e6 * seconds:.0f} µs, mostly for calls of operations that compute little",
        f"try a larger batch_size than {facts.batch_size}, or compile=True",
    )
