"""Modules that cut their layers over a device mesh, each with a counterpart on one device that has the same weights."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import SGD
from torchmetrics import MeanMetric, SumMetric

from tests.extensions.fsdp.modules import ByHand, Matrices, Weighted
from tests.extensions.fsdp.programs import Net


def cut_blocks(module: Any) -> None:
    for block in module.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, module.device_mesh["tensor_parallel"], plan)


class Cut(Net):
    """Written for Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        cut_blocks(self)


class CutAndSharded(Cut):
    """Shards its units by itself as well."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])


class CutOnMeta(Net):
    """Its blocks have no values when they are cut."""

    def configure_model(self) -> None:
        self.blocks.to("meta")
        cut_blocks(self)


class Plain:
    """Stepped by SGD: AdamW would hide a factor of the gradients."""

    def configure_optimizers(self: Any) -> Any:
        return SGD(self.parameters(), lr=0.05, momentum=0.9)


class PlainNet(Plain, Net):
    pass


class PlainCut(Plain, CutAndSharded):
    pass


def draw_by_rank() -> None:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)


class ByRank(PlainNet):
    """Other values in each process, and a layer that `configure_model` makes of other random numbers in each."""

    def __init__(self) -> None:
        super().__init__()
        draw_by_rank()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.last = None

    def setup(self, stage: str) -> None:
        draw_by_rank()

    def configure_model(self) -> None:
        self.last = nn.Linear(7, 1)


class CutByRank(ByRank):
    def configure_model(self) -> None:
        super().configure_model()
        cut_blocks(self)
        for part in (self.first, *self.blocks, self.last):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


class ShardedOverAll(PlainCut):
    """Shards a layer over all processes, of which some compute a batch together."""

    def configure_model(self) -> None:
        super().configure_model()
        fully_shard(self.first)


class ShardedAlone(PlainNet):
    """Cuts nothing."""

    def configure_model(self) -> None:
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])


class CutWithBuffer(Cut):
    """A layer that is cut has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.register_buffer("factor", torch.ones(1))


class CutApart(Cut):
    """Two blocks share a weight, until each of them is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[1].up.weight


class Differing(Cut):
    """Its batches are others in each process, from one on."""

    def __init__(self, since: int = 0) -> None:
        super().__init__()
        self.since = since

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        shift = self.global_rank if self.trainer.fit_loop.batch_idx >= self.since else 0
        return [batch[0] + shift, batch[1]]


class SelfAttention(nn.Module):
    """Attention whose number of heads is an attribute."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = []
        for layer in (self.query, self.key, self.value):
            parts.append(layer(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Heads(Net):
    """Attention over the features, between the layers of `Net`, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = SelfAttention(8, 4)
        self.dropout = nn.Dropout(0.2)
        self.end = nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.embedding(features.unsqueeze(-1))
        hidden = self.end(hidden + self.dropout(self.attention(self.norm(hidden))))
        return super().forward(hidden.mean(-1))


class CutHeads(Heads):
    def configure_model(self) -> None:
        mesh = self.device_mesh["tensor_parallel"]
        self.attention.heads //= mesh.size()
        plan: Any = {name: ColwiseParallel() for name in ("query", "key", "value")}
        parallelize_module(self.attention, mesh, {**plan, "output": RowwiseParallel()})
        cut_blocks(self)


class OwnDropout:
    """Begins with other random numbers in each process, after layers are cut."""

    def configure_optimizers(self) -> Any:
        draw_by_rank()
        return super().configure_optimizers()  # type: ignore[misc]


class HeadsByRank(OwnDropout, Heads):
    pass


class CutHeadsByRank(OwnDropout, CutHeads):
    pass


class WithoutDropout(Heads):
    """Without random numbers, which differ where a process has a part of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)


class CutSequence(WithoutDropout):
    """From the embedding to the end of the attention, each process has a part of the sequence."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["tensor_parallel"]
        self.attention.heads //= mesh.size()
        plan: Any = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan["embedding"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        plan["norm"] = SequenceParallel(use_local_output=True)
        plan["attention"] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        )
        plan["attention.output"] = RowwiseParallel(output_layouts=Shard(1))
        plan["end"] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        )
        parallelize_module(self, mesh, plan)


class CutWeighted(Weighted, Cut):
    pass


class CutByHand(ByHand, Cut):
    pass


class Counting(Net):
    """Counts samples, by metrics and by logged values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.ModuleDict({"in_train": SumMetric(), "in_val": SumMetric()})
        self.mean = nn.ModuleDict({"in_train": MeanMetric(), "in_val": MeanMetric()})

    def count(self, batch: Any, name: str) -> None:
        self.seen[f"in_{name}"](len(batch[0]))
        self.mean[f"in_{name}"](batch[1].mean(), weight=len(batch[0]))
        values = {f"{name}_seen": self.seen[f"in_{name}"], f"{name}_mean": self.mean[f"in_{name}"]}
        self.log_dict(values, on_epoch=True, on_step=False)
        self.log(f"{name}_sum", batch[1].sum(), reduce_fx="sum", on_epoch=True, on_step=False, sync_dist=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count(batch, "train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count(batch, "val")


class CutCounting(Counting, Cut):
    pass


class CutMatrices(Matrices, Cut):
    pass


# The module on one device, the one on a mesh, and the options of `outcome`.
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "clipped, and fitted again": (Net, Cut, {"gradient_clip_val": 0.05, "again": True}),
    "clipped by value": (Net, Cut, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulated": (Net, Cut, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
    "fewer samples than processes": (Net, Cut, {"count": 1}),
    "stepped by SGD": (PlainNet, PlainCut, {}),
    "sharded by the module": (Net, CutAndSharded, {"again": True}),
    "weighted": (Weighted, CutWeighted, {"accumulate_grad_batches": 2}),
    "by hand": (ByHand, CutByHand, {"count": 48, "again": True}),
    "counted once": (Counting, CutCounting, {}),
    "stepped by Muon": (Matrices, CutMatrices, {}),
    "averaged": (Net, Cut, {"callbacks": [EMAWeightAveraging(decay=0.9)]}),
    "a sequence in parts": (WithoutDropout, CutSequence, {"again": True}),
}
# Random numbers: where processes compute one batch together, they draw those of one device.
RANDOM: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "heads and dropout": (Heads, CutHeads, {"again": True}),
}
