"""Runs whose processes torchrun or Slurm has started: all of them use the folder and the checkpoint of rank 0.

Hydra names a folder by the time, which each process reads for itself. So the processes meet before the run, and rank 0
says which folder and which checkpoint it has.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write

from equipoise.app.output import remove_if_empty
from equipoise.errors import ConfigurationError
from equipoise.interop.remote.paths import is_remote, to_path
from equipoise.parallel.communication.rank import Rank, find_rank
from equipoise.strategies.distributed.process_group import ProcessGroup

__all__ = ["agree_with_first", "check_can_share", "check_runs_here", "is_first", "launched_rank", "refuse_sweep"]

# Seconds until all processes have come: those of other machines may start later.
_MEETING = 1800.0


def launched_rank(values: Mapping[str, Any] | None = None) -> Rank | None:
    """Return the rank of this process among those that train together; None if a launcher has started no others.

    Args:
        values: The configuration. Processes of `strategy.independent=true` are runs of their own. Default: unknown.

    Raises:
        ConfigurationError: If the launcher's variables are incomplete.
    """
    rank = find_rank()
    if rank is None or rank.world_size == 1:
        return None
    strategy = {} if values is None else values["strategy"]
    if isinstance(strategy, Mapping) and strategy.get("independent"):
        return None
    return rank


def is_first(values: Mapping[str, Any] | None = None) -> bool:
    """Return True in the process that writes the files of the run.

    Args:
        values: As for `launched_rank`.
    """
    rank = launched_rank(values)
    return rank is None or rank.global_rank == 0


def check_can_share(values: Mapping[str, Any], rank: Rank) -> None:
    """Check that several processes can carry out a run together.

    Raises:
        ConfigurationError: If the run is a job of a sweep, or has a launcher, which starts processes by itself.
    """
    if values.get("launcher"):
        name = values["launcher"]["_target_"].rpartition(".")[2]
        raise ConfigurationError(
            f"{name} starts its processes by itself, but this is one of {rank.world_size}: {rank.origin}. Start one"
            " process, or leave launcher out."
        )
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        refuse_sweep(rank)


def check_runs_here(values: Mapping[str, Any], command: str) -> None:
    """Check that a command that starts processes of its own is one process on one machine.

    Args:
        values: The configuration.
        command: The command, for the message.

    Raises:
        ConfigurationError: If there is a launcher, or another machine or process.
    """
    if values.get("launcher"):
        raise ConfigurationError(f"{command} runs on the devices of this machine; leave the launcher out.")
    if values["trainer"].get("num_nodes") not in (None, 1):
        raise ConfigurationError(f"{command} runs on this machine alone; leave trainer.num_nodes out.")
    rank = launched_rank()
    if rank is not None:
        raise ConfigurationError(
            f"{command} starts its processes by itself, but this is one of {rank.world_size}: {rank.origin}. Start one"
            " process."
        )


def refuse_sweep(rank: Rank) -> None:
    """Refuse a sweep, in which each process would choose the jobs by itself.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(
        f"--multirun runs the jobs of a sweep from one process, but this is one of {rank.world_size}: {rank.origin}."
        " Start one process; launcher=pool gives each job a device, launcher=ray uses a cluster."
    )


def agree_with_first(config: DictConfig, values: Mapping[str, Any], rank: Rank) -> dict[str, Any]:
    """Return the folder and the checkpoint of rank 0, and leave the folder that Hydra has made for this process.

    All processes call this together, rank 0 once its folder exists.

    Args:
        config: The configuration; its folder becomes that of rank 0.
        values: The same in plain values.
        rank: The rank of this process.

    Returns:
        The values of `output_dir` and `ckpt_path`.
    """
    folder = to_path(values["output_dir"])
    if isinstance(folder, Path):
        folder = folder.absolute()
    here = {"output_dir": str(folder), "ckpt_path": values["ckpt_path"]}
    agreed = _of_first(here, rank)
    if agreed["output_dir"] != here["output_dir"]:
        _use_folder(config, agreed["output_dir"])
        _move_log(Path(here["output_dir"]), Path(agreed["output_dir"]))
        remove_if_empty(Path(here["output_dir"]))
    return agreed


def _of_first(value: dict[str, Any], rank: Rank) -> dict[str, Any]:
    here = rank.count_here()
    devices = [torch.device("cpu")] * here
    group = ProcessGroup(devices, rank.count_machines(here), timeout=_MEETING, backend="gloo", on_joined=lambda: None)
    received: dict[str, Any] = group.launch(lambda: group.broadcast(value))
    return received


def _use_folder(config: DictConfig, folder: str) -> None:
    """Set the folder of a run in its configuration, and in Hydra's, which others may refer to."""
    with read_write(config), open_dict(config):
        config["output_dir"] = folder
    # Hydra's is always one of this machine.
    if HydraConfig.initialized() and not is_remote(folder):
        runtime: Any = HydraConfig.get().runtime
        with read_write(runtime), open_dict(runtime):
            runtime["output_dir"] = folder


def _move_log(old: Path, new: Path) -> None:
    """Let Hydra's log go to another folder, if nothing was logged yet: its file is made then."""
    for handler in logging.getLogger().handlers:
        if not isinstance(handler, logging.FileHandler) or handler.stream is not None:
            continue
        file = Path(handler.baseFilename)
        if file.parent == old:
            vars(handler)["baseFilename"] = str(new / file.name)
