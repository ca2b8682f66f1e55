"""Shards as each process writes them: pieces of tensors, and folders that are there completely or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from equipoise import CheckpointError
from equipoise.extensions.fsdp.state.writing.background import InBackground
from equipoise.extensions.fsdp.state.writing.pieces import HostCopies, Piece, pieces_of
from equipoise.parallel.shards.index import can_be_saved
from equipoise.parallel.shards.reading import ShardReader
from tests.parallel.shards.folders import save
from tests.support.trainer_runs import refuses


def test_read_on_the_cpu_whatever_the_default_device_is(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    save(tmp_path / "x.ckpt", {"weight": tensor}, {"state_dict": {}}, 2)
    with torch.device("meta"):
        copies = HostCopies().take([Piece("weight", tensor, (2, 3), (0, 0))])
        assert torch.equal(ShardReader(tmp_path / "x.ckpt").whole("weight"), tensor)
    assert torch.equal(copies[0].tensor, tensor)


class Scaled(Tensor):
    """A tensor whose values are more than its bytes."""


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    assert can_be_saved(torch.ones(2))
    assert can_be_saved(torch.nn.Parameter(torch.ones(2)))
    assert can_be_saved(torch.zeros(2).to(torch.float8_e5m2))
    scaled = torch.ones(2).as_subclass(Scaled)
    assert not can_be_saved(scaled)
    assert not can_be_saved(torch.ones(2).to_sparse())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        assert [piece.name for piece in pieces_of({"w": plain})] == ["w"]
        refuses(
            lambda: pieces_of({"w": DTensor.from_local(scaled, mesh, [Shard(0)])}),
            *("'w' cannot be saved in shards: it is a Scaled of torch.float32", "checkpoints='full'"),
            error=CheckpointError,
        )
    finally:
        dist.destroy_process_group()


KILLED = """
import os, sys
from pathlib import Path
import torch
from equipoise.extensions.fsdp.state.writing import saving
from tests.parallel.shards.folders import save
where, count = sys.argv[2], 0
original = getattr(saving, where)
def killed(*arguments):
    os.kill(os.getpid(), 9)
setattr(saving, where, killed)
save(Path(sys.argv[1]), {"w": torch.ones(4)}, {"state_dict": {}})
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["write_pieces", "write_index", "_write"])
def test_killed(where: str, tmp_path: Path) -> None:
    """The earlier checkpoint stays, and what is left is removed at the next one."""
    path = tmp_path / "a.ckpt"
    save(path, {"w": torch.arange(12.0)}, {"state_dict": {}})
    script = [sys.executable, "-c", KILLED, str(path), where]
    assert subprocess.run(script, timeout=300).returncode == -9
    assert len(os.listdir(path.parent)) == 2
    assert ShardReader(path).whole("w").sum() == 66
    save(path, {}, {"state_dict": {}})
    assert os.listdir(path.parent) == [path.name]


# In the background.


def test_errors_of_the_thread_come_at_the_next_call() -> None:
    background = InBackground("test")

    def fails() -> None:
        raise CheckpointError("on purpose.")

    background.start(fails)
    with pytest.raises(CheckpointError, match="on purpose"):
        background.start(fails)
    background.wait()
