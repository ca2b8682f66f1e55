"""Connect to a Ray cluster, or start one on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from equipoise.errors import ConfigurationError

__all__ = ["connected", "import_ray"]


def import_ray() -> Any:
    """Return Ray with its parts for training and tuning.

    Raises:
        ConfigurationError: If it is not installed.
    """
    try:
        import ray
        import ray.train.torch
        import ray.tune
    except ImportError as error:
        raise ConfigurationError(f"launcher=ray needs Ray: pip install 'equipoise[ray]' ({error}).") from error
    return ray


@contextmanager
def connected(address: str | None, cpus: float = 0.0, gpus: float = 0.0) -> Iterator[Any]:
    """Connect to a cluster during a block, or start one on this machine that ends with the block.

    A cluster to which the program is connected already is used and stays. One that is started here has no dashboard and
    sends no statistics of usage. Ray chooses the ports on which it listens, on all interfaces of the machine.

    Args:
        address: Address of a cluster, such as "auto" or "ray://head:10001". None: that in RAY_ADDRESS, else a cluster
            on this machine.
        cpus: Number of CPUs that the program will ask for; checked where a cluster is started here. Default: 0.
        gpus: Number of GPUs that it will ask for. Default: 0.

    Yields:
        The module `ray`.

    Raises:
        ConfigurationError: If Ray is not installed, no cluster is at the address, or this machine has too few CPUs or
            GPUs.
    """
    ray = import_ray()
    # 1. A connection of the program itself.
    if ray.is_initialized():
        yield ray
        return
    # 2. One for the block. A cluster that is started here cannot grow.
    starts_here = address is None and not os.environ.get("RAY_ADDRESS")
    if starts_here:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", include_dashboard=False, logging_level="WARNING")
    else:
        _connect(ray, address)
    try:
        if starts_here:
            _check_resources(ray.cluster_resources(), cpus, gpus)
        yield ray
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    try:
        ray.init(address=address, logging_level="WARNING")
    except ConnectionError as error:
        name = address or os.environ.get("RAY_ADDRESS")
        raise ConfigurationError(
            f"There is no Ray cluster at {name}: {error}. Start one with `ray start --head`, or leave launcher.address"
            " out, which starts one on this machine."
        ) from error


def _check_resources(available: dict[str, float], cpus: float, gpus: float) -> None:
    """Refuse a request that would wait forever."""
    for name, needed in (("CPU", cpus), ("GPU", gpus)):
        there = available.get(name, 0.0)
        if needed > there:
            raise ConfigurationError(
                f"launcher=ray needs {needed:g} {name}s for its workers, but Ray finds {there:g} on this machine, and"
                " would wait for more. Take fewer workers or less for each, as in launcher.cpus_per_worker=0.5, or name"
                " a cluster by launcher.address."
            )
