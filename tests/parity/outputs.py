"""Reads the folder a run leaves behind: names of all files, and their contents in a form that can be compared."""

import re
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

__all__ = ["numbered", "plain", "read_checkpoint", "read_folder"]

EVENTS = "events.out.tfevents"


def read_folder(root: Path) -> dict[str, Any]:
    """All files below a folder by their names: checkpoints as dictionaries, tables as lines, event files as events."""
    contents: dict[str, Any] = {}
    for path in sorted(root.rglob("*"), key=numbered):
        name = str(path.relative_to(root))
        if path.is_symlink():
            contents[name] = f"link to {path.readlink()}"
        elif path.name.startswith(EVENTS):
            contents.setdefault(f"{path.parent.relative_to(root)}/{EVENTS}", []).append(read_events(path))
        elif path.suffix in (".ckpt", ".pt"):
            contents[name] = read_checkpoint(path, root)
        elif path.is_file():
            contents[name] = plain(path.read_text(), root) if path.suffix == ".json" else path.read_text().splitlines()
    return contents


def numbered(path: Path) -> list[str | int]:
    """A key that sorts the tenth file behind the ninth: the names of event files end with a number."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def read_checkpoint(path: Path, root: Path) -> Any:
    """A checkpoint without what is Equipoise's own, and without absolute paths."""
    content = torch.load(path, weights_only=False)
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if not str(key).startswith("equipoise")}
    return plain(content, root)


def read_events(path: Path) -> dict[str, Any]:
    """Scalars as (step, value), texts and graphs by their tags."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path)).Reload()
    tags = events.Tags()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]}
    return {"scalars": scalars, "tensors": sorted(tags["tensors"]), "graph": tags["graph"]}


def plain(value: Any, root: Path) -> Any:
    """A deep copy in which paths are relative to `root`, functions are left out and tensors are detached copies."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (str, PurePath)):
        return str(value).replace(str(root), "<root>")
    if isinstance(value, dict):
        return {plain(key, root): plain(item, root) for key, item in value.items() if not callable(item)}
    if type(value) in (list, tuple):
        return type(value)(plain(item, root) for item in value)
    return value
