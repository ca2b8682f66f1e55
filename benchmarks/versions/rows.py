"""The rows of the matrix: one combination of Python and exact versions each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["FEATURES", "ROWS", "Row", "rows_named"]

# The oldest version of each range in pyproject.toml. Nothing else is constrained beside them: newer packages of the
# constraints file need newer ones.
OLDEST = {
    "lightning": "2.6.0",
    "torchmetrics": "1.5.0",
    "hydra-core": "1.3.2",
    "omegaconf": "2.3.0",
    "numpy": "1.26.0",
    "rich": "14.1.0",
    "cloudpickle": "3.0.0",
    "psutil": "5.9.0",
    "packaging": "24.2",
}


@dataclass(frozen=True)
class Row:
    """One combination of versions.

    Attributes:
        name: Its name on the command line.
        python: Version of Python, such as "3.11".
        packages: Exact versions by package; others are those of constraints.txt.
        is_constrained: False: no other package is constrained. Default: True.
    """

    name: str
    python: str
    packages: Mapping[str, str] = field(default_factory=dict)
    is_constrained: bool = True


def _torch(python: str, version: str) -> Row:
    return Row(f"py{python}-torch{version}", python, {"torch": version})


ROWS = (
    _torch("3.11", "2.11.0"),
    _torch("3.11", "2.12.1"),
    _torch("3.11", "2.13.0"),
    _torch("3.11", "2.14.1"),
    _torch("3.11", "2.15.0"),
    _torch("3.12", "2.11.0"),
    _torch("3.12", "2.15.0"),
    _torch("3.13", "2.15.0"),
    # The oldest version of every package at once.
    Row("oldest", "3.11", {"torch": "2.11.0", **OLDEST}, is_constrained=False),
    # Releases and nightlies that nothing here has been tested with.
    Row("newest", "3.13", is_constrained=False),
)

_SHORT = ("fit", "trainer.max_epochs=1", "trainer.devices=[cpu,cpu]")

# Commands of `equipoise` that use each feature on the digits example, outside of the tests.
FEATURES: Mapping[str, tuple[str, ...]] = {
    "train and report": ("fit",),
    "dp": (*_SHORT, "strategy=dp"),
    "ddp": (*_SHORT, "strategy=ddp"),
    "fsdp": (*_SHORT, "strategy=fsdp"),
    "pipeline, threads": (*_SHORT, "strategy=pipeline", "strategy.engine=threads"),
    "pipeline, processes": (*_SHORT, "strategy=pipeline", "strategy.engine=processes"),
    "compile": ("fit", "trainer.max_epochs=1", "trainer.compile=true"),
    "plan": ("plan", "trainer.devices=2x24GiB"),
}


def rows_named(names: list[str]) -> list[Row]:
    """Return rows by their names, in the order of the names.

    Raises:
        SystemExit: If there is no row of a name.
    """
    by_name = {row.name: row for row in ROWS}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SystemExit(f"There is no row {unknown[0]!r}; there are {', '.join(by_name)}.")
    return [by_name[name] for name in names]
