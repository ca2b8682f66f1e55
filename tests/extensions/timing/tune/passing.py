"""A project whose time passes by a clock, and the clock."""

from tests.support.callback_runs import Clock

__all__ = ["CLOCK", "FILES"]

CLOCK = Clock()

FILES = {
    "conf/config.yaml": """
        defaults: [equipoise, _self_]
        trainer: {accelerator: cpu, enable_progress_bar: false, enable_checkpointing: false}
        callbacks: {memory_logger: null, run_report: null, run_summary: null}
        logger: {csv: null}
        seed: 0
        module: {_target_: tuned.module.Net}
        data: {_target_: tuned.module.Rows, num_workers: 0, seconds: 0.0}
        """,
    "tuned/__init__.py": "",
    "tuned/module.py": """
        import torch
        from lightning.pytorch import LightningDataModule, LightningModule
        from torch.utils.data import DataLoader, Dataset

        from tests.extensions.timing.tune.passing import CLOCK


        class Ticking(Dataset):
            def __init__(self, seconds):
                self.seconds = seconds

            def __len__(self):
                return 24

            def __getitem__(self, index):
                CLOCK.tick(self.seconds)
                return torch.tensor([float(index), 1.0])


        class Net(LightningModule):
            def __init__(self, *, forward=1.0, hook=0.0, validation=0.0, fails=False):
                super().__init__()
                self.layer = torch.nn.Linear(2, 1)
                self.times = {"forward": forward, "hook": hook, "validation": validation}
                self.fails = fails

            def training_step(self, batch, batch_idx):
                if self.fails:
                    raise ValueError("a mistake of mine")
                CLOCK.tick(self.times["forward"])
                return self.layer(batch).square().mean()

            def on_train_batch_end(self, outputs, batch, batch_idx):
                CLOCK.tick(self.times["hook"])

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.0)


        class Validating(Net):
            def validation_step(self, batch, batch_idx):
                CLOCK.tick(self.times["validation"])


        class Rows(LightningDataModule):
            def __init__(self, *, seconds=0.0, num_workers=0):
                super().__init__()
                self.seconds, self.num_workers = seconds, num_workers

            def train_dataloader(self):
                return DataLoader(Ticking(self.seconds), num_workers=self.num_workers)


        class Validated(Rows):
            def val_dataloader(self):
                return DataLoader(Ticking(0.0), batch_size=24)


        class Fixed(Rows):
            def __init__(self, *, seconds):
                super().__init__(seconds=seconds)
        """,
}
