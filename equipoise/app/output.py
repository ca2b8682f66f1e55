"""The output folder of a run: its files, and the checkpoints in folders of earlier runs."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from equipoise.trainer.logging.csv_rows import put_aside

__all__ = ["find_checkpoint", "keep_metrics", "without_empty_folder"]


def find_checkpoint(which: str, values: Mapping[str, Any]) -> Path | None:
    """The newest checkpoint of an earlier run, or the best one of that run.

    Looks in the run's own folder first, which holds checkpoints if it was named by hand and used before, then under
    `outputs` and `multirun` where the run stands. There, runs of another module are passed over.

    Args:
        which: "last" or "best".
        values: The configuration of the run that asks, resolved.

    Returns:
        The checkpoint, or None if there is none.
    """
    earlier = [path for root in ("outputs", "multirun") for path in Path(root).glob("**/*.ckpt")]
    newest = next(iter(_newest_first(Path(values["output_dir"]).glob("**/*.ckpt"))), None) or next(
        (path for path in _newest_first(earlier) if _same_module(path, values)), None
    )
    return newest if newest is None or which == "last" else _best(newest) or newest


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _same_module(checkpoint: Path, values: Mapping[str, Any]) -> bool:
    """Whether the run that wrote a checkpoint trained the same module."""
    found = next((path for folder in checkpoint.parents if (path := folder / "config.yaml").is_file()), None)
    try:
        earlier = yaml.safe_load(found.read_text(encoding="utf-8")) if found else None
    except yaml.YAMLError:  # that run was killed as it wrote
        return False
    module = earlier.get("module") if isinstance(earlier, dict) else None
    return isinstance(module, dict) and module.get("_target_") == values["module"]["_target_"]


def _best(checkpoint: Path) -> Path | None:
    """The best checkpoint of the run that wrote this one, if it still lies there."""
    callbacks = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True).get("callbacks", {})
    for key, state in sorted(callbacks.items(), key=lambda item: item[1].get("monitor") is None):
        if key.startswith("ModelCheckpoint") and state.get("best_model_path"):
            best = checkpoint.parent / Path(state["best_model_path"]).name  # the folder may have been moved
            return best if best.is_file() else None
    return None


def keep_metrics(output: Path) -> None:
    """Puts the metrics of an earlier run in the same folder aside, which the CSV logger would delete.

    Args:
        output: The folder; `metrics.csv` becomes `metrics_0.csv`, or the next number that is free.
    """
    metrics = output / "metrics.csv"
    if metrics.exists():
        put_aside(metrics)


@contextlib.contextmanager
def without_empty_folder(output: Path) -> Iterator[None]:
    """Remove the folder of a run that is refused before it begins, if it is empty.

    Hydra makes it before it hands over. Folders above it, such as that of the day, are removed if they are empty too,
    up to the working folder.

    Args:
        output: The folder of the run.
    """
    try:
        yield
    except Exception:
        here = Path.cwd()
        with contextlib.suppress(OSError):  # one that is not empty
            for folder in (output.absolute(), *output.absolute().parents):
                if here not in folder.parents:
                    break
                folder.rmdir()
        raise
