"""Flags of `equipoise compare`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from equipoise.app.command import list_of_names, present, read_flags, seconds, whole_number
from equipoise.errors import ConfigurationError
from equipoise.interop.remote.paths import is_remote

__all__ = ["Options"]

# Flags whose fields have other names.
_FIELDS = {"--largest": "bound", "--json": "as_json"}
_TAKES = (
    "equipoise compare takes overrides, --config-dir FOLDER, --strategies=NAME,NAME, --steps=N, --largest[=N],"
    " --timeout=SECONDS, --output=FOLDER and --json"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of the command.

    Attributes:
        strategies: Names of the strategies. Default: None, the usual ones.
        steps: Number of steps whose time is measured. Default: 5.
        searches_largest: Whether the largest batch is looked for. Default: False.
        bound: The largest batch to try. Default: None, a multiple of the configured one.
        timeout: Seconds for each trial. Default: 600.
        output: The folder for files. Default: None, a new one under outputs.
        as_json: Whether the output is JSON. Default: False.
    """

    strategies: list[str] | None = None
    steps: int = 5
    searches_largest: bool = False
    bound: int | None = None
    timeout: float = 600.0
    output: Path | None = None
    as_json: bool = False

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
        values = {}
        for name, value in flags.items():
            values[_FIELDS.get(name, name.removeprefix("--"))] = value
        return cls(**values, searches_largest="--largest" in flags), overrides


def _bound(name: str, text: str | None) -> int | None:
    # The flag may stand alone.
    if text is None:
        return None
    return whole_number(name, text)


def _folder(name: str, text: str | None) -> Path:
    if not text or is_remote(text):
        raise ConfigurationError(
            f"{name} takes a folder of this machine, such as {name}=comparison, not {text or ''!r}."
        )
    return Path(text)
