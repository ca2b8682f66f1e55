from importlib.metadata import entry_points

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from equipoise import LightningDataModule, LightningModule, RunReport, Trainer

local_sgd = pytest.importorskip("local_sgd.strategy", reason="not installed: pip install ./examples/extension")
FEATURES = torch.randn(17, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Linear(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Linear(3, 1).double()

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]).sum(1) - batch[0].prod(1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(FEATURES), batch_size=4)


# Steps behind which processes average; the epochs end with steps 2 and 5, and with a checkpoint.
CASES = [(1, 0, range(6)), (2, 0, [1, 2, 4, 5]), (8, 1, [0, 2, 5])]


def by_hand(rounds):
    nets = [Linear(), Linear()]
    optimizers = [net.configure_optimizers() for net in nets]
    for step in range(6):
        for rank in range(2):
            batch = FEATURES[rank::2][step % 3 * 4 :][:4]  # rank 1 has none in the last step of an epoch
            optimizers[rank].zero_grad()
            if len(batch):
                nets[rank].training_step([batch], 0).backward()
            optimizers[rank].step()
        for pair in zip(*(net.parameters() for net in nets), strict=True) if step in rounds else ():
            mean = (pair[0].data + pair[1].data) / 2
            pair[0].data, pair[1].data = mean, mean.clone()
    return [parameter.data for parameter in nets[0].parameters()]


@pytest.mark.filterwarnings("ignore:The '.*' does not have many workers", "ignore:.*treespec, LeafSpec")
@pytest.mark.parametrize(("every", "warmup", "rounds"), CASES)
def test_local_sgd_equals_the_loop_by_hand(tmp_path, every, warmup, rounds):
    module, strategy = Linear(), local_sgd.LocalSGDStrategy(every=every, warmup_steps=warmup)
    (divergence,) = (point.load()() for point in entry_points(group="equipoise.callbacks", name="divergence"))
    options = {"accelerator": "cpu", "devices": 2, "logger": False, "precision": 64, "default_root_dir": tmp_path}
    trainer = Trainer(strategy=strategy, max_epochs=2, callbacks=[divergence, RunReport()], **options)
    trainer.fit(module, Data())
    torch.testing.assert_close([p.data for p in module.parameters()], by_hand(rounds), rtol=1e-12, atol=1e-12)
    assert trainer.callback_metrics["divergence"] > 0
    rows = f"<td>local_sgd</td><td>{len(rounds)}</td><td>{len(rounds) * 32}</td></tr><tr><td>ddp</td><td>6</td><td>192<"
    assert rows in (tmp_path / "report.html").read_text().replace(' class="number"', "")


def test_the_command_counts_exchanges(tmp_path, capsys):
    targets = [f"{part}: {{_target_: {__name__}.{name}}}\n" for part, name in (("module", "Linear"), ("data", "Data"))]
    (tmp_path / "config.yaml").write_text("defaults: [equipoise, _self_]\n" + "".join(targets))
    (command,) = (point.load() for point in entry_points(group="equipoise.commands", name="rounds"))
    command.run(["strategy=local_sgd", "strategy.every=2", "trainer.devices=2"], [tmp_path])
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["3", "2"]
