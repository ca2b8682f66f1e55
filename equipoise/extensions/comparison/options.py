"""Flags of `equipoise compare`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from equipoise.app.command import list_of_names, present, read_flags, seconds, whole_number
from equipoise.errors import ConfigurationError

__all__ = ["Options"]

_TIMEOUT = 600.0
_STEPS = 5
_TAKES = (
    "equipoise compare takes overrides, --config-dir FOLDER, --strategies=NAME,NAME, --steps=N, --largest[=N],"
    " --timeout=SECONDS, --output=FOLDER and --json"
)


@dataclass(frozen=True)
class Options:
    """Flags of the command.

    Attributes:
        strategies: Names of the strategies; None for the usual ones.
        steps: Number of steps whose time is measured.
        searches_largest: Whether the largest batch is looked for.
        bound: The largest batch to try; None for a multiple of the configured one.
        timeout: Seconds for each trial.
        output: The folder for files; None for a new one under outputs.
        as_json: Whether the output is JSON.
    """

    strategies: list[str] | None
    steps: int
    searches_largest: bool
    bound: int | None
    timeout: float
    output: Path | None
    as_json: bool

    @classmethod
    def read(cls, arguments: Sequence[str]) -> tuple["Options", list[str]]:
        """Return the options, and the overrides."""
        readers = {
            "--strategies": list_of_names,
            "--steps": whole_number,
            "--largest": _bound,
            "--timeout": seconds,
            "--output": _folder,
            "--json": present,
        }
        overrides, flags = read_flags(arguments, readers, _TAKES)
        options = cls(
            strategies=flags.get("--strategies"),
            steps=flags.get("--steps", _STEPS),
            searches_largest="--largest" in flags,
            bound=flags.get("--largest"),
            timeout=flags.get("--timeout", _TIMEOUT),
            output=flags.get("--output"),
            as_json="--json" in flags,
        )
        return options, overrides


def _bound(name: str, text: str | None) -> int | None:
    # The flag may stand alone.
    if text is None:
        return None
    return whole_number(name, text)


def _folder(name: str, text: str | None) -> Path:
    if not text:
        raise ConfigurationError(f"{name} takes a folder, such as {name}=comparison.")
    return Path(text)
