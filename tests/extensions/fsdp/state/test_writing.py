"""Shards as each process writes them: pieces of tensors, and folders that are there completely or not at all."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from equipoise import CheckpointError
from equipoise.extensions.fsdp.state.writing.background import InBackground
from equipoise.extensions.fsdp.state.writing.pieces import HostCopies, Piece, pieces_of
from equipoise.parallel.shards.index import can_be_saved
from equipoise.parallel.shards.reading import ShardReader
from tests.parallel.shards.folders import save
from tests.support.process_groups import group
from tests.support.programs import Program
from tests.support.trainer_runs import refuses

__all__ = ["group"]


def test_pieces_are_on_the_cpu_whatever_the_default_device_is(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    save(tmp_path / "x.ckpt", {"weight": tensor}, {"state_dict": {}}, 2)
    with torch.device("meta"):
        copies = HostCopies().take([Piece("weight", tensor, (2, 3), (0, 0))])
        assert torch.equal(ShardReader(tmp_path / "x.ckpt").whole("weight"), tensor)
    assert torch.equal(copies[0].tensor, tensor)


class Scaled(Tensor):
    """A tensor whose values are more than its bytes."""


@pytest.mark.usefixtures("group")
def test_tensors_that_are_more_than_their_bytes_cannot_be_saved() -> None:
    scaled = torch.ones(2).as_subclass(Scaled)
    assert all(can_be_saved(each) for each in (torch.nn.Parameter(torch.ones(2)), torch.zeros(2).to(torch.float8_e5m2)))
    assert not any(can_be_saved(each) for each in (scaled, torch.ones(2).to_sparse()))
    weight = DTensor.from_local(scaled, init_device_mesh("cpu", (1,)), [Shard(0)])
    words = ("'w' cannot be saved in shards: it is a Scaled of torch.float32", "checkpoints='full'")
    refuses(lambda: pieces_of({"w": weight}), *words, error=CheckpointError)


KILLED = """
import os, sys
from pathlib import Path
import torch
from equipoise.extensions.fsdp.state.writing import saving
from tests.parallel.shards.folders import save
setattr(saving, sys.argv[2], lambda *arguments: os.kill(os.getpid(), 9))
save(Path(sys.argv[1]), {"w": torch.ones(4)}, {"state_dict": {}})
"""


@pytest.mark.parametrize("where", ["write_pieces", "write_index", "_write"])
def test_the_earlier_checkpoint_stays_where_a_process_is_killed_as_it_writes(where: str, tmp_path: Path) -> None:
    """The next one removes what is left."""
    path = tmp_path / "a.ckpt"
    save(path, {"w": torch.arange(12.0)}, {"state_dict": {}})
    with Program(KILLED, str(path), where) as program:
        program.finish()
        assert program.returncode == -9
    assert len(os.listdir(tmp_path)) == 2
    assert ShardReader(path).whole("w").sum() == 66
    save(path, {}, {"state_dict": {}})
    assert os.listdir(tmp_path) == [path.name]


def test_one_checkpoint_is_written_at_a_time_and_errors_come_at_the_next() -> None:
    background = InBackground("test")

    def fails() -> None:
        raise CheckpointError("on purpose.")

    background.start(fails)
    with pytest.raises(CheckpointError, match="on purpose"):
        background.start(fails)
    background.wait()
