"""Mutations of a checkout: drawn at random, or those of another checkout found again."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from operators import Mutation, mutations_of

__all__ = ["Sample", "draw", "found_again", "read_results"]


@dataclass(frozen=True)
class Sample:
    """A mutation of a file.

    Attributes:
        path: The file, relative to the package.
        text: The line in which the mutation begins.
        mutation: The mutation.
    """

    path: str
    text: str
    mutation: Mutation


def samples_of(package: Path, file: Path) -> list[Sample]:
    """Return all mutations of a file."""
    source = file.read_text()
    path, lines = str(file.relative_to(package)), source.splitlines()
    return [Sample(path, lines[mutation.line - 1], mutation) for mutation in mutations_of(source)]


def draw(package: Path, folders: Sequence[str], count: int, seed: int) -> list[Sample]:
    """Draw mutations, every possible one as likely as every other.

    Args:
        package: The folder of the package.
        folders: Its folders whose files are mutated.
        count: Number of mutations.
        seed: Seed of the draw.
    """
    candidates: list[Sample] = []
    for folder in folders:
        for file in sorted((package / folder).rglob("*.py")):
            candidates += samples_of(package, file)
    return Random(seed).sample(candidates, min(count, len(candidates)))


def found_again(package: Path, sample: Sample) -> Sample | None:
    """Return a mutation of another checkout as one of this, where its line may have moved; None where it is gone."""
    file = package / sample.path
    same = [other for other in samples_of(package, file) if _words(other) == _words(sample)] if file.exists() else []
    return min(same, key=lambda other: abs(other.mutation.line - sample.mutation.line), default=None)


def _words(sample: Sample) -> tuple[str | int, ...]:
    return sample.text, sample.mutation.column, sample.mutation.before, sample.mutation.after


def read_results(file: Path) -> list[tuple[Sample, str]]:
    """Return the mutations of a file of results, and what caught each."""
    outcomes = []
    for entry in map(json.loads, file.read_text().splitlines()):
        mutation = Mutation(**{name: entry[name] for name in Mutation.__dataclass_fields__})
        outcomes.append((Sample(entry["path"], entry["text"], mutation), entry["caught_by"]))
    return outcomes
