"""Process groups: how processes meet, join and leave."""

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from equipoise.errors import ConfigurationError
from equipoise.parallel.communication.rank import Rank
from equipoise.parallel.payload.authentication import key_of_environment, use_key

__all__ = ["StoreServer", "another_group", "follows_from_another", "group_store", "host_group", "joined"]

LOOPBACK = "127.0.0.1"
_GROUPS = count()  # joined so far, as many in every process
_MEETING = timedelta(seconds=60)  # at least; processes on a busy machine do not start at the same moment
_SIGNS = ("connection closed by peer", "connection reset", "pair closure", "broken pipe", "timed out waiting", "nccl")


class StoreServer:
    """The store through which the processes of this machine find each other; it listens on the loopback interface only.

    The socket is bound before anybody asks for it, so no other program can take its port. As a context manager it
    closes its port at the end.
    """

    def __init__(self) -> None:
        listener = socket.socket()
        listener.bind((LOOPBACK, 0))
        listener.listen(128)
        self.port: int = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            LOOPBACK,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store's from now on
            use_libuv=False,
        )

    def __enter__(self) -> "StoreServer":
        return self

    def __exit__(self, *error: object) -> None:
        """Close the port, whoever still refers to this object, as the traceback of an error does."""
        self._store = None


@contextlib.contextmanager
def joined(
    place: Rank, device: torch.device, *, timeout: timedelta, port: int | None = None, backend: str | None = None
) -> Iterator[None]:
    """Joins the process group, and leaves it in order if nothing goes wrong.

    A group that somebody else began is taken as it is, and left to them.

    Args:
        place: Where this process stands.
        device: Where it computes.
        timeout: How long processes wait for one another.
        port: That of a store on this machine. None: the environment says where to meet.
        backend: Default: "nccl" for CUDA, else "gloo".
    """
    if port is None:  # else the parent has given this process a key
        use_key(key_of_environment())
    if dist.is_initialized():
        with _beside(timeout):
            yield
        return
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    store: Store
    with contextlib.ExitStack() as hosts:
        with _loopback(only=port is not None):
            if port is not None:
                store = TCPStore(LOOPBACK, port, is_master=False, timeout=max(timeout, _MEETING), use_libuv=False)
            else:
                _meet_under_slurm()
                store = _meet(place, timeout)
            # What an earlier group, or attempt of torchrun's, has left there would mislead this one.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = PrefixStore(f"equipoise/{attempt}/{next(_GROUPS)}", store)
            if port is not None:
                store.set(f"here/{place.global_rank}", "")
                store.wait([f"here/{rank}" for rank in range(place.world_size)], max(timeout, _MEETING))
            dist.init_process_group(
                backend, store=store, rank=place.global_rank, world_size=place.world_size, timeout=timeout
            )
            hosts.enter_context(_beside(timeout))
        hosts.enter_context(_kept(store))
        yield
        dist.barrier(device_ids=[device.index or 0] if backend == "nccl" else None)
    dist.destroy_process_group()


_stores: list[Store] = []  # of this process, while it belongs to a group that it has joined


def group_store() -> Store | None:
    """Return the store of the group that this process has joined; None outside of one, and in a group of others."""
    return _stores[-1] if _stores else None


@contextlib.contextmanager
def _kept(store: Store) -> Iterator[None]:
    _stores.append(store)
    try:
        yield
    finally:
        _stores.pop()


_host_groups: list[dist.ProcessGroup] = []  # of this process, while it belongs to a group that knows devices only


def host_group() -> dist.ProcessGroup | None:
    """Return the process group of all processes that takes tensors of the host; None: the default group does."""
    return _host_groups[-1] if _host_groups else None


@contextlib.contextmanager
def _beside(timeout: timedelta) -> Iterator[None]:
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
    """Begin one more group of the same processes, for the host's tensors, with connections of its own.

    Args:
        timeout: How long processes wait for one another in it.
        local: Whether all processes are on this machine, and meet over the loopback interface only.
    """
    with _loopback(only=local):
        group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend="gloo")
    yield group
    dist.destroy_process_group(group)


_meeting_points: dict[tuple[str, str, int, int], Store] = {}  # by address, port, rank and number of processes


def _meet(place: Rank, timeout: timedelta) -> Store:
    """Return the store at which the processes meet, where the environment says; the same one for every group.

    The first process serves the store, where no launcher does. If it closed the store after each run, a faster process
    could connect for the next run before that, and lose its connection: both would wait until the timeout.
    """
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigurationError(
            f"The environment says RANK={place.global_rank} and WORLD_SIZE={place.world_size}, but not"
            f" {' and '.join(missing)}, where the processes are to meet. Start the script with torchrun, which sets all"
            " of them."
        )
    point = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], place.global_rank, place.world_size)
    if point in _meeting_points:
        _meeting_points[point].set_timeout(timeout)
        return _meeting_points[point]
    try:
        store: Store = next(rendezvous("env://", place.global_rank, place.world_size, timeout=timeout))[0]
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigurationError(
            f"MASTER_PORT={os.environ['MASTER_PORT']} is taken by another program. Choose another port."
        ) from error
    _meeting_points[point] = store
    return store


def _meet_under_slurm() -> None:
    """Lets processes that Slurm has started meet on its first machine, at a port that follows from the job."""
    if "SLURM_PROCID" in os.environ and "SLURM_NODELIST" in os.environ:
        first = SLURMEnvironment.resolve_root_node_address(os.environ["SLURM_NODELIST"])
        os.environ.setdefault("MASTER_ADDR", first)
        os.environ.setdefault("MASTER_PORT", str(15000 + int(os.environ.get("SLURM_JOB_ID", "0")[-4:])))


@contextlib.contextmanager
def _loopback(*, only: bool) -> Iterator[None]:
    """Lets gloo connect processes over the loopback interface alone, unless somebody chose another."""
    name = "GLOO_SOCKET_IFNAME"
    if not only or name in os.environ:
        yield
        return
    os.environ[name] = next((each for _, each in socket.if_nameindex() if each in ("lo", "lo0")), "lo")
    try:
        yield
    finally:
        del os.environ[name]


def follows_from_another(error: BaseException) -> bool:
    """Whether an error looks like what happens to a process when another one ends or hangs."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)
