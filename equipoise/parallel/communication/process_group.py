"""Join and leave process groups: the processes meet at a store, exchange tensors, and leave together."""

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from equipoise.errors import ConfigurationError
from equipoise.parallel.communication.rank import Rank
from equipoise.parallel.payload.authentication import key_of_environment, use_key

__all__ = [
    "StoreServer",
    "another_group",
    "follows_from_another",
    "group_apart",
    "group_store",
    "host_group",
    "joined",
    "loopback",
]

LOOPBACK = "127.0.0.1"
# Shortest time to meet: processes on a busy machine do not start at the same moment.
_MEETING = timedelta(seconds=60)
# Parts of messages of errors that follow from the end of another process.
_SIGNS = ("connection closed by peer", "connection reset", "pair closure", "broken pipe", "timed out waiting", "nccl")
# Ports that follow from the number of a job of Slurm: this one, and 9999 above it.
_FIRST_PORT_UNDER_SLURM = 15000

# Numbers of the groups that this process joins, the same in every process.
_group_numbers = count()
# Stores of this process while it belongs to a group that it has joined.
_stores: list[Store] = []
# Groups for tensors on the host, while the default group exchanges tensors on devices only.
_host_groups: list[dist.ProcessGroup] = []
# Stores that outlive their groups, by address, port, rank and number of processes.
_meeting_points: dict[tuple[str, str, int, int], Store] = {}


class StoreServer:
    """Store through which the processes of this machine meet; it listens on the loopback interface only.

    The socket is bound immediately, so no other program can take its port. As a context manager it closes its port at
    the end.

    Attributes:
        port: Port on which it listens.
    """

    def __init__(self) -> None:
        listener = socket.socket()
        listener.bind((LOOPBACK, 0))
        listener.listen(128)
        self.port: int = listener.getsockname()[1]
        # The store owns the socket and closes it.
        self._store: TCPStore | None = TCPStore(
            LOOPBACK,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=False,
        )

    def __enter__(self) -> "StoreServer":
        return self

    def __exit__(self, *error: object) -> None:
        """Close the port, even if a traceback still refers to this object."""
        self._store = None


@contextlib.contextmanager
def joined(
    place: Rank,
    device: torch.device,
    *,
    timeout: timedelta,
    port: int | None = None,
    backend: str | None = None,
    columns: int = 1,
) -> Iterator[Store | None]:
    """Join the process group, and leave it in order if no error occurs.

    A group that another program began is used as it is and not ended.

    Args:
        place: Rank of this process.
        device: Device of this process.
        timeout: Time for which processes wait for one another.
        port: Port of a store on this machine. Default: None, the environment states where to meet.
        backend: Torch's backend. Default: "nccl" for CUDA, else "gloo".
        columns: Number of groups into which the processes are divided: rank r joins group r % columns, in which its
            rank is r // columns. Default: 1.

    Yields:
        The store at which all processes have met; None if another program began the group.

    Raises:
        ConfigurationError: If the environment does not state where to meet, or another program uses the port.
    """
    if port is None:
        # With a port, the parent has sent this process a key.
        use_key(key_of_environment())
    if dist.is_initialized():
        if columns > 1:
            raise ConfigurationError(
                "Another program has begun a process group of all processes, but replicas of a pipeline need groups of"
                " their own. Let the strategy begin them, or leave `replicas` out."
            )
        with _with_host_group(timeout):
            yield None
        return
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    with contextlib.ExitStack() as cleanup:
        # 1. Meet, and begin the group of this process's column and the one for its host.
        with loopback(only=port is not None):
            store = _connect(place, timeout, port)
            rank, column = divmod(place.global_rank, columns)
            column_store = PrefixStore(f"column/{column}", store)
            size = place.world_size // columns
            dist.init_process_group(backend, store=column_store, rank=rank, world_size=size, timeout=timeout)
            cleanup.enter_context(_with_host_group(timeout))
        cleanup.enter_context(_registered(column_store))
        yield store
        # 2. Wait for all, so that no process leaves while another still exchanges with it.
        dist.barrier(device_ids=[device.index or 0] if backend == "nccl" else None)
    dist.destroy_process_group()


# Groups of this process


def group_store() -> Store | None:
    """Return the store of the group that this process has joined; None if it joined none itself."""
    if not _stores:
        return None
    return _stores[-1]


@contextlib.contextmanager
def _registered(store: Store) -> Iterator[None]:
    """Let `group_store` return a store during a block."""
    _stores.append(store)
    try:
        yield
    finally:
        _stores.pop()


def host_group() -> dist.ProcessGroup | None:
    """Return the process group of all processes that exchanges tensors on the host; None: the default group."""
    if not _host_groups:
        return None
    return _host_groups[-1]


@contextlib.contextmanager
def _with_host_group(timeout: timedelta) -> Iterator[None]:
    """Begin a process group for the host beside a default group that exchanges between devices only."""
    if dist.get_backend() != "nccl":
        yield
        return
    group = dist.new_group(timeout=timeout, backend="gloo")
    _host_groups.append(group)
    try:
        yield
        dist.destroy_process_group(group)
    finally:
        _host_groups.remove(group)


@contextlib.contextmanager
def another_group(timeout: timedelta, *, local: bool) -> Iterator[dist.ProcessGroup]:
    """Begin one more group of the same processes, for tensors on the host, with separate connections.

    Args:
        timeout: Time for which processes wait for one another in it.
        local: True if all processes are on this machine and meet over the loopback interface only.
    """
    with loopback(only=local):
        group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend="gloo")
    yield group
    dist.destroy_process_group(group)


def group_apart(store: Store, name: str, rank: int, size: int, timeout: timedelta, *, local: bool) -> dist.ProcessGroup:
    """Return a group of processes that need not belong to the same default group, for tensors on the host.

    Torch's functions know the group only as far as they take ranks within it: `isend` and `irecv`.

    Args:
        store: Store of all these processes.
        name: Name of the group, by which its processes find one another in the store.
        rank: Rank of this process in the group.
        size: Number of processes in the group.
        timeout: Time for which processes wait for one another in it.
        local: True if all processes are on this machine and meet over the loopback interface only.
    """
    with loopback(only=local):
        group: Any = dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, timeout)
    return group  # type: ignore[no-any-return]


# Where the processes meet


def _connect(place: Rank, timeout: timedelta, port: int | None) -> Store:
    """Return a store that only this group uses, once all processes of this machine are connected."""
    store: Store
    meeting_time = max(timeout, _MEETING)
    if port is not None:
        store = TCPStore(LOOPBACK, port, is_master=False, timeout=meeting_time, use_libuv=False)
    else:
        _set_address_under_slurm()
        store = _meet(place, timeout)
    # Entries of an earlier group, or of an earlier attempt of torchrun, would mislead this group.
    store = PrefixStore(f"equipoise/{_attempt()}/{next(_group_numbers)}", store)
    if port is not None:
        store.set(f"here/{place.global_rank}", "")
        keys = [f"here/{rank}" for rank in range(place.world_size)]
        store.wait(keys, meeting_time)
    return store


def _attempt() -> str:
    """Return the number of torchrun's attempt if its store outlives an attempt; empty if rank 0 makes a new store.

    Each agent of torchrun counts its own restarts. One that has joined later counts fewer, so the number must not
    separate the processes of a new store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return ""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _meet(place: Rank, timeout: timedelta) -> Store:
    """Return the store at the address in the environment, the same one for every group.

    The main process serves the store, unless a launcher does. If it closed the store after each run, a faster process
    could connect for the next run before that, and lose its connection: both would wait until the timeout.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"The environment says RANK={place.global_rank} and WORLD_SIZE={place.world_size}, but not"
            f" {' and '.join(missing)}, where the processes are to meet. Start the script with torchrun, which sets all"
            " of them."
        )
    point = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], place.global_rank, place.world_size)
    store: Store
    if point in _meeting_points:
        store = _meeting_points[point]
        store.set_timeout(timeout)
        return store
    try:
        meetings = rendezvous("env://", place.global_rank, place.world_size, timeout=timeout)
        store = next(meetings)[0]
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigurationError(
            f"MASTER_PORT={os.environ['MASTER_PORT']} is taken by another program. Choose another port."
        ) from error
    _meeting_points[point] = store
    return store


def _set_address_under_slurm() -> None:
    """Set the address of processes that Slurm has started: its first machine, and a port that follows from the job."""
    if "SLURM_PROCID" not in os.environ or "SLURM_NODELIST" not in os.environ:
        return
    first_machine = SLURMEnvironment.resolve_root_node_address(os.environ["SLURM_NODELIST"])
    os.environ.setdefault("MASTER_ADDR", first_machine)
    job = os.environ.get("SLURM_JOB_ID", "0")
    port = _FIRST_PORT_UNDER_SLURM + int(job[-4:])
    os.environ.setdefault("MASTER_PORT", str(port))


@contextlib.contextmanager
def loopback(*, only: bool) -> Iterator[None]:
    """Let gloo connect processes over the loopback interface only, unless the user chose another interface."""
    variable = "GLOO_SOCKET_IFNAME"
    if not only or variable in os.environ:
        yield
        return
    os.environ[variable] = _loopback_interface()
    try:
        yield
    finally:
        del os.environ[variable]


def _loopback_interface() -> str:
    for _, interface in socket.if_nameindex():
        if interface in ("lo", "lo0"):
            return interface
    return "lo"


# Errors


def follows_from_another(error: BaseException) -> bool:
    """Return True for an error that is typical of a process when another one ends or hangs.

    Args:
        error: Error of this process.
    """
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    return any(sign in message for sign in _SIGNS)
