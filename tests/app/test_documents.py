"""The first module of README.md is short, and the project of docs/configuration.md runs as the page says."""

import re

import pytest
import yaml

from tests.docs.blocks.pages import ROOT, blocks_of
from tests.support.projects import project_in

CODE = {
    "conf/data/images.yaml": "_target_: my_project.data.Images\n",
    "my_project/module.py": """
        import torch
        from lightning.pytorch import LightningModule

        class Net(LightningModule):
            def __init__(self, width, lr):
                super().__init__()
                self.layer = torch.nn.Linear(2, width)

            def training_step(self, batch, batch_idx):
                return self.layer(batch).square().mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)
        """,
    "my_project/data.py": """
        import torch
        from lightning.pytorch import LightningDataModule
        from torch.utils.data import DataLoader

        class Images(LightningDataModule):
            def train_dataloader(self):
                return DataLoader(torch.ones(12, 2), batch_size=1)
        """,
}


def test_the_first_module_of_the_readme_is_short():
    (block,) = (block for block in blocks_of(ROOT / "README.md") if block.language == "python")
    module = block.source[block.source.index("class Classifier") : block.source.index("\nimages, labels")]
    assert len(module.strip().splitlines()) <= 20


@pytest.mark.thorough
@pytest.mark.whole_package
def test_the_project_in_the_documentation(tmp_path, equipoise):
    page = blocks_of(ROOT / "docs" / "configuration.md")
    blocks = [block.source for block in page if block.language == "yaml"]
    files = {re.search(r"^# (conf/\S+\.yaml)", block, flags=re.MULTILINE)[1]: block for block in blocks}
    assert set(files) == {
        *("conf/config.yaml", "conf/module/net.yaml", "conf/experiment/first.yaml", "conf/trainer/quick.yaml"),
        "conf/logger/wandb.yaml",
    }
    with project_in(tmp_path, files | CODE, "my_project"):
        run = ("fit", "experiment=first", "trainer=quick")
        code, out, err = equipoise(*run, "logger=[csv,wandb]", "--cfg", "job")
        assert code == 0, err
        code, _, err = equipoise(*run, "trainer.max_epochs=1")
        assert code == 0, err
    config = yaml.safe_load(out)
    assert config["module"]["width"] == 128
    assert (config["trainer"]["limit_train_batches"], config["trainer"]["gradient_clip_val"]) == (10, 1.0)
    assert set(config["callbacks"]) == {
        "model_checkpoint",
        "learning_rate_monitor",
        "step_times",
        "run_summary",
        "run_report",
        "memory_logger",
    }
    assert config["logger"]["wandb"]["project"] == "digits"
    assert "width: 128" in next(tmp_path.glob("outputs/*/*/config.yaml")).read_text()
