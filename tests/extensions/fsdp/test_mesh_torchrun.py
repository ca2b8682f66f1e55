"""A device mesh over processes that torchrun has started, with a module of the form that Lightning's examples have."""

from pathlib import Path

import pytest
import torch

from tests.strategies.programs import start_script, torchrun, wait_for

pytestmark = pytest.mark.slow

# A network that is made in `configure_model`, is cut and sharded there, and has a part of the heads in each process.
SCRIPT = """
import sys, warnings
import lightning as L, torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from equipoise import FSDPStrategy, Trainer

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_heads = 4
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(8, 8, bias=False) for _ in range(4))
    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(8)
        self.w1, self.w2, self.w3 = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 12)
    def forward(self, x):
        h = self.norm(x + self.attention(x))
        return h + self.w2(F.silu(self.w1(h)) * self.w3(h))

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = None
    def configure_model(self):
        if self.model is not None:
            return
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Embedding(10, 8), Layer(), Layer(), nn.Linear(8, 10))
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["tensor_parallel"]
        for layer in self.model[1:3]:
            plan = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
            plan |= {"attention.wo": RowwiseParallel()}
            plan |= {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
            layer.attention.n_heads = layer.attention.n_heads // mesh.size()
            parallelize_module(layer, mesh, plan)
        for layer in self.model[1:3]:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
    def training_step(self, batch, batch_idx):
        tokens = batch[0]
        loss = F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3)

warnings.filterwarnings("error", "The cut layers of")
folder, rows, strategy = sys.argv[1], int(sys.argv[2]), sys.argv[3]
data = TensorDataset(torch.randint(10, (24, 7), generator=torch.Generator().manual_seed(2)))
if strategy == "fsdp":
    strategy = FSDPStrategy(data=rows, tensor="auto")
trainer = Trainer(strategy=strategy, accelerator="cpu", devices="auto", max_epochs=2, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                  precision="64-true")
module = Module()
trainer.fit(module, DataLoader(data, batch_size=8 // rows))
weights = {name: value.detach() for name, value in module.state_dict().items()}
torch.save([weights, trainer.callback_metrics], f"{folder}/{trainer.global_rank}.pt")
"""


@pytest.mark.parametrize(("processes", "rows"), [(2, 1), (4, 2)])
def test_each_size(processes: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    alone = tmp_path / "alone"
    alone.mkdir()
    wait_for([start_script(script, [str(alone), "1", "single_device"])])
    options = ["--standalone", f"--nproc-per-node={processes}"]
    assert torchrun(monkeypatch, script, [str(tmp_path), str(rows), "fsdp"], options) == []
    weights, values = torch.load(alone / "0.pt")
    for rank in range(processes):
        found, logged = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-12)
        torch.testing.assert_close(logged, values, rtol=0, atol=1e-12)
