"""An allocator that really fails: that of a process with little address space. For GPUs see tests/gpu."""

import json

import pytest

from tests.support.programs import Program

SCRIPT = """
import json, resource, sys
import lightning as L, psutil, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from equipoise import OOMRecovery, Trainer

limited = sys.argv[1] == "limited"

class Wide(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 20_000), nn.ReLU(), nn.Linear(20_000, 1))
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

torch.set_num_threads(1)
module, recovery = Wide(), OOMRecovery()
data = DataLoader(TensorDataset(torch.randn(2 * 3000, 8, generator=torch.Generator().manual_seed(1))), batch_size=3000)
trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[recovery], logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
module.net(torch.zeros(2, 8)).sum().backward()  # libraries take their own memory first
if limited:
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 300 * 2**20, -1))
trainer.fit(module, data)
events = [[e.phase, e.parts, e.requested] for e in recovery.events]
print(json.dumps({"events": events, "weight": float(module.net[2].weight.double().sum())}))
"""


def run(*arguments: str) -> dict[str, object]:
    with Program(SCRIPT, *arguments) as program:
        written, complaints = program.finish()
        assert program.returncode == 0, complaints
    answer: dict[str, object] = json.loads(written.splitlines()[-1])
    return answer


@pytest.mark.slow
def test_little_address_space() -> None:
    free = run("free")
    limited = run("limited")
    assert free["events"] == []
    events = limited["events"]
    assert isinstance(events, list)
    assert events
    for phase, _, requested in events:
        assert phase in ("forward", "backward")
        assert requested > 2**20
    assert limited["weight"] == pytest.approx(free["weight"], rel=1e-4)
