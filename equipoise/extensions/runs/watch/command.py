"""Serve the page of runs until the user interrupts it."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.app.command import read_flags
from equipoise.errors import ConfigurationError
from equipoise.extensions.runs.found import folders_of
from equipoise.extensions.runs.watch.server import WatchServer
from equipoise.extensions.runs.watch.watched_runs import WatchedRuns

__all__ = ["watch"]

_TAKES = "equipoise watch takes FOLDERS and --port=NUMBER"
_DEFAULT_PORT = 8265


def watch(arguments: Sequence[str], configurations: Sequence[Path] = ()) -> None:
    """Run the command.

    Raises:
        ConfigurationError: If an argument is wrong, a folder does not exist, or the port is taken.
    """
    names, flags = read_flags(arguments, {"--port": _port}, _TAKES)
    # The default folders are looked for each time: a sweep may begin later.
    runs = WatchedRuns(folders_of(names, _TAKES) if names else ())
    with _server(runs, flags.get("--port")) as server:
        try:
            print(f"Runs: {server.url}  (on this machine alone; Ctrl-C ends it)", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print("Ended.")


def _server(runs: WatchedRuns, port: int | None) -> WatchServer:
    try:
        return WatchServer(runs, _DEFAULT_PORT if port is None else port)
    except OSError as error:
        if port is not None:
            raise ConfigurationError(
                f"--port={port} cannot be used: {error.strerror or error}. Name another, or leave it out."
            ) from error
    # Any free one.
    return WatchServer(runs, 0)


def _port(name: str, text: str | None) -> int:
    if text is not None and text.isascii() and text.isdigit() and int(text) <= 65_535:
        return int(text)
    raise ConfigurationError(f"{name} takes a number from 0 to 65535, of which 0 is any free port, not {text!r}.")
