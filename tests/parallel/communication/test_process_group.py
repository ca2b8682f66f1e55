"""A process group: who can reach its store, whose it is, and what it leaves behind."""

import os
import socket
from functools import partial
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from equipoise.parallel.communication import process_group
from equipoise.parallel.communication.process_group import StoreServer, follows_from_another, host_group, joined
from equipoise.parallel.communication.rank import Rank, find_rank
from equipoise.parallel.workers.launch import launch
from tests.support.ports import unused_port
from tests.support.process_groups import CPU, PATIENCE, gathered, in_group, started, summed

INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
ALONE = Rank(0, 0, 0, 1, 1)


# Who can reach it


def connections_of_this_process() -> list[Any]:
    """Return the TCP connections; psutil 5 has another name for them."""
    process = psutil.Process()
    read = getattr(process, "net_connections", None) or process.connections
    return list(read("tcp"))


def addresses() -> set[str]:
    """Those at which this process can be reached, or has been."""
    return {each.laddr.ip for each in connections_of_this_process()}


def ports() -> dict[int, str]:
    """Those on which this process listens, with the addresses."""
    connections = connections_of_this_process()
    return {each.laddr.port: each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


def test_the_store_listens_to_this_machine_alone_until_it_is_closed() -> None:
    before = ports()
    with StoreServer() as store:
        opened = {port: address for port, address in ports().items() if port not in before}
        assert opened == {store.port: "127.0.0.1"}
    assert ports() == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port))


def reached(rank: int) -> tuple[float, set[str]]:
    return summed(), addresses()


def test_processes_talk_over_the_loopback_interface() -> None:
    for total, found in in_group(reached):
        assert total == 3
        assert found <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


# Whose it is


def twice(place: Rank, port: int) -> tuple[list[float], list[Any]]:
    """A group of others around ours, also of one that fails, then one of ours on the same store."""
    store = dist.PrefixStore("others", dist.TCPStore("127.0.0.1", port, timeout=PATIENCE, use_libuv=False))
    dist.init_process_group("gloo", store=store, rank=place.global_rank, world_size=place.world_size)
    found = find_rank({})
    with joined(place, CPU, timeout=PATIENCE, port=port):
        sums = [summed()]
    sums.append(summed())
    with pytest.raises(ZeroDivisionError), joined(place, CPU, timeout=PATIENCE, port=port):
        raise ZeroDivisionError
    sums.append(summed())
    dist.destroy_process_group()
    with joined(place, CPU, timeout=PATIENCE, port=port):
        sums.append(summed())
        places = gathered(found)
    assert not dist.is_initialized()
    return sums, places


def test_a_process_group_of_others_stays_open_and_our_own_is_closed() -> None:
    assert started(twice) == ([3, 3, 3, 3], [Rank(0, 0, 0, 2, None), Rank(1, 1, 0, 2, None)])


def beside(place: Rank, port: int, begun: bool) -> tuple[float, bool, bool]:
    """Takes gloo for a backend of devices, which knows no tensors of the host."""
    dist.get_backend = lambda group=None: "nccl"  # in this process, which ends with this function
    if begun:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=place.global_rank, world_size=2, timeout=PATIENCE)
    before = host_group()
    with joined(place, CPU, timeout=PATIENCE, port=port):
        value = torch.tensor(place.global_rank + 1.0)
        dist.all_reduce(value, group=host_group())
        is_another = host_group() not in (None, dist.group.WORLD)
    return float(value), is_another, before is None and host_group() is None


@pytest.mark.parametrize("begun", [False, True])
def test_a_group_of_the_hosts_beside_one_of_the_devices(begun: bool) -> None:
    assert started(beside, begun) == (3.0, True, True)


def one_after_another(place: Rank, port: int) -> list[tuple[float, bool]]:
    found = []
    for count in (3, 2, 1, 3):
        if place.global_rank < count:
            own = Rank(place.global_rank, place.local_rank, 0, count, count)
            with joined(own, CPU, timeout=PATIENCE, port=port):
                total = summed()
            found.append((total, dist.is_initialized()))
        else:
            elsewhere = StoreServer()
            with joined(ALONE, CPU, timeout=PATIENCE, port=elsewhere.port):  # groups are counted by each process
                pass
    return found


def test_groups_one_after_another_on_one_store() -> None:
    """Also of other sizes: what an earlier one has left there misleads nobody."""
    assert started(one_after_another, processes=3) == [(6, False), (3, False), (1, False), (6, False)]


def meets_by_environment(place: Rank, port: int) -> list[float]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(place.global_rank), WORLD_SIZE="2")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as under torchrun, which holds the store
    sums = []
    for _ in range(2):
        with joined(place, CPU, timeout=PATIENCE):
            sums.append(summed())
    return sums


def test_the_environment_says_where_to_meet() -> None:
    assert started(meets_by_environment) == [3, 3]


def keeps_its_store(place: Rank, port: int) -> bool:
    """As under Slurm: if the first process closed it after a run, a faster one would wait for it until the timeout."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(place.global_rank), WORLD_SIZE="2")
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    stores = []
    for _ in range(2):
        with joined(place, CPU, timeout=PATIENCE):
            stores.append(process_group._meet(place, PATIENCE))
    return stores[0] is stores[1]


def test_the_store_of_the_first_process_stays_for_the_next_group() -> None:
    assert started(keeps_its_store, port=unused_port())


def leaves_a_word(port: int, attempt: int, rank: int) -> bool:
    """Return True if a group finds in the store what an earlier attempt has left there."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=str(attempt))
    with joined(ALONE, CPU, timeout=PATIENCE):
        store = dist.distributed_c10d._get_default_store()
        found = store.check(["word"])
        store.set("word", "left")
    return bool(found)


def test_a_restart_finds_nothing_of_the_attempt_before() -> None:
    """Torchrun's store lives on; addresses of processes that are gone would be taken for those of their successors."""
    store = StoreServer()
    assert [launch(partial(leaves_a_word, store.port, attempt), 1) for attempt in range(3)] == [False] * 3


# What it leaves behind


def interfaces(place: Rank, port: int) -> list[str | None]:
    """Return the interfaces in the environment before a group, in it and after it."""
    found = [os.environ.get(INTERFACE)]
    with joined(place, CPU, timeout=PATIENCE, port=port):
        found.append(os.environ.get(INTERFACE))
    return [*found, os.environ.get(INTERFACE)]


@pytest.mark.parametrize("chosen", [None, LOOPBACK])
def test_the_network_interface_is_restored(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERFACE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(INTERFACE, chosen)
    assert started(interfaces) == [chosen] * 3
    assert os.environ.get(INTERFACE) == chosen


def waits_in_vain(place: Rank, port: int) -> tuple[bool, bool]:
    """The other one does not come to the second exchange."""
    follows = False
    try:
        with joined(place, CPU, timeout=PATIENCE, port=port):
            summed()
            if place.global_rank == 1:
                raise ValueError
            summed()
    except (RuntimeError, ValueError) as error:
        follows = follows_from_another(error)
    return follows, dist.is_initialized()


def test_a_group_that_failed_is_not_left_in_order() -> None:
    """Leaving would wait for the others."""
    assert started(waits_in_vain) == (True, True)


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), True),
        (dist.DistNetworkError("no answer"), True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # of the user's own connections
    ],
)
def test_errors_that_follow_from_another_process(error: Exception, follows: bool) -> None:
    assert follows_from_another(error) == follows
