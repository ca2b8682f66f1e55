"""Candidates: changes of a configuration that may be remedies of a limit."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from equipoise.app.config.annotations import parameters_of
from equipoise.app.config.checks import locate
from equipoise.extensions.timing.limits import SHORT_STEPS, SLOW_PROCESS, Facts, Limit, times_less_often
from equipoise.extensions.timing.parts import (
    CALLBACK,
    CHECKPOINTS,
    COPYING,
    DATA,
    EXCHANGE,
    VALIDATION,
)

__all__ = ["Candidate", "candidates_for"]

_WORKERS = (2, 4, 8)
# Epochs of fewer steps start workers often.
_SHORT_EPOCH = 500
_TIMES = 10
# Arguments of callbacks that say in how many steps they act, by parts of their names.
_INTERVALS = ("every", "interval", "refresh_rate")


@dataclass(frozen=True)
class Candidate:
    """A change of a configuration.

    Attributes:
        overrides: The overrides that make it; empty where the configuration has no key for it.
        loader: Arguments of the training DataLoader that make it instead.
        period: Number of steps after which its effects repeat. Default: 1.
        workers: Number of workers that it names. Default: 0.
    """

    overrides: tuple[str, ...] = ()
    loader: dict[str, Any] = field(default_factory=dict)
    period: int = 1
    workers: int = 0

    @property
    def label(self) -> str:
        """The change in a few words."""
        if self.overrides:
            return " ".join(self.overrides)
        if not self.loader:
            return "as it is"
        arguments = [f"{name}={value}" for name, value in self.loader.items()]
        return f"DataLoader({', '.join(arguments)})"


def candidates_for(limit: Limit, facts: Facts, values: Mapping[str, Any], device: str) -> list[Candidate]:
    """Return the remedies of a limit that a configuration can express."""
    part = limit.part
    candidates: list[Candidate] = []
    # The settings that the sentence proposes come first.
    if limit.settings:
        candidates.append(_of_settings(limit, facts))
    if part in (DATA, VALIDATION):
        candidates += _of_loader(facts, values)
    if part in (DATA, COPYING) and device == "cuda":
        candidates.append(_loader(values, pin_memory=True))
    if part.startswith(CALLBACK):
        candidates += _of_callback(part.removeprefix(CALLBACK).strip(), values)
    elif part == CHECKPOINTS:
        candidates += _of_checkpoints(times_less_often(limit.share), facts, values)
    elif part == EXCHANGE:
        candidates.append(Candidate(("trainer.accumulate_grad_batches=2",), period=2))
    elif part == SHORT_STEPS:
        candidates += _of_short_steps(facts, values, device)
    elif part == SLOW_PROCESS and "shares" in _parameters(values["strategy"]):
        candidates.append(Candidate(("strategy.shares=auto",)))
    return candidates


def _of_settings(limit: Limit, facts: Facts) -> Candidate:
    """Return the arguments of the trainer that the sentence names."""
    overrides = tuple(f"trainer.{name}={value}" for name, value in limit.settings.items())
    period = math.prod(limit.settings.values())
    if "check_val_every_n_epoch" in limit.settings:
        period *= facts.epoch_steps
    return Candidate(overrides, period=math.ceil(period))


def _of_loader(facts: Facts, values: Mapping[str, Any]) -> Iterator[Candidate]:
    """Yield other numbers of workers."""
    if facts.num_workers is None:
        return
    most = max(_WORKERS[0], facts.processors)
    counts = [count for count in (0, *_WORKERS) if count <= most and count != facts.num_workers]
    for count in counts:
        yield _loader(values, num_workers=count)
    if facts.epoch_steps < _SHORT_EPOCH:
        yield _loader(values, num_workers=max([*counts, facts.num_workers]), persistent_workers=True)


def _loader(values: Mapping[str, Any], **arguments: Any) -> Candidate:
    """Return other arguments of the loader: overrides, if the configuration has keys for all of them."""
    overrides = []
    workers = arguments.get("num_workers", 0)
    for name, value in arguments.items():
        key = _key_of(values, name)
        if key is None:
            return Candidate(loader=arguments, workers=workers)
        overrides.append(f"{key}={str(value).lower()}")
    return Candidate(tuple(overrides), workers=workers)


def _key_of(values: Mapping[str, Any], name: str) -> str | None:
    """Return the key by which the data module, or else the module, takes an argument of its loader."""
    for group in ("data", "module"):
        node = values.get(group)
        if not isinstance(node, dict):
            continue
        if name in node:
            return f"{group}.{name}"
        # The configuration does not have to name it.
        if name in _parameters(node):
            return f"+{group}.{name}"
    return None


def _parameters(node: Any) -> Mapping[str, Any]:
    """Return the parameters of the class or function that a part of the configuration names."""
    if not isinstance(node, dict) or "_target_" not in node:
        return {}
    return parameters_of(locate(node["_target_"], "_target_"))


def _of_callback(class_name: str, values: Mapping[str, Any]) -> Iterator[Candidate]:
    """Yield intervals of a callback that are ten times as long, and no progress bar if it is one."""
    for name, node in _callbacks(values, class_name):
        for key, value in node.items():
            is_interval = any(word in key for word in _INTERVALS)
            # By type, as true counts among the integers.
            if is_interval and type(value) is int and value > 0:
                longer = _TIMES * value
                yield Candidate((f"callbacks.{name}.{key}={longer}",), period=longer)
    if class_name.endswith("ProgressBar"):
        yield Candidate(("trainer.enable_progress_bar=false",))


def _of_checkpoints(times: int, facts: Facts, values: Mapping[str, Any]) -> Iterator[Candidate]:
    """Yield longer intervals between checkpoints."""
    for name, node in _callbacks(values, "Checkpoint"):
        steps = node.get("every_n_train_steps")
        epochs = node.get("every_n_epochs") or 1
        if steps:
            more_steps = times * steps
            yield Candidate((f"callbacks.{name}.every_n_train_steps={more_steps}",), period=more_steps)
        elif facts.epoch_steps < math.inf:
            more_epochs = times * epochs
            period = math.ceil(more_epochs * facts.epoch_steps)
            yield Candidate((f"callbacks.{name}.every_n_epochs={more_epochs}",), period=period)


def _callbacks(values: Mapping[str, Any], ending: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the configured callbacks whose classes end with a word, and their names."""
    callbacks = values["callbacks"] or {}
    for name, node in callbacks.items():
        if node is not None and node["_target_"].endswith(ending):
            yield name, node


def _of_short_steps(facts: Facts, values: Mapping[str, Any], device: str) -> Iterator[Candidate]:
    """Yield steps with fewer calls."""
    if facts.num_workers:
        yield _loader(values, num_workers=0)
    yield Candidate(("trainer.compile=true",))
    if device == "cuda":
        yield Candidate(("trainer.capture=true",))
