"""Code of README.md and docs/configuration.md works as shown, and together; tests/docs runs each page by itself."""

import re
import textwrap
from pathlib import Path

import pytest
import torch
import yaml

from tests.support.projects import write

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.thorough
def test_the_first_module_the_callback_and_a_pipeline(tmp_path, monkeypatch, capfd):
    """As pasted; that the module alone prints no warning is shown by tests/docs."""
    monkeypatch.chdir(tmp_path)
    (first_module,) = blocks(README, "python")
    (callback,) = [block for block in blocks(START, "python") if "class GradientNorm" in block]
    names: dict[str, object] = {"__name__": "readme", "torch": torch}
    exec(compile(callback, "callback", "exec"), names)  # noqa: S102
    use = "Trainer(logger=False, callbacks=[GradientNorm()], "
    exec(compile(first_module.replace("Trainer(", use), "first module", "exec"), names)  # noqa: S102
    assert "train_loss" in capfd.readouterr().out
    start = first_module.index("class Classifier")
    assert len(first_module[start:].split("\nimages, labels")[0].strip().splitlines()) <= 20

    pipelined = 'max_epochs=1, strategy="pipeline", devices=["cpu", "cpu"]'
    again = first_module[first_module.index("Trainer(max_epochs") :].replace("max_epochs=5", pipelined)
    exec(compile(again, "pipeline", "exec"), names)  # noqa: S102
    assert "train_loss" in capfd.readouterr().out


@pytest.mark.thorough
@pytest.mark.whole_package
def test_the_project_in_the_documentation(tmp_path, equipoise, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {}
    for block in blocks(CONFIGURATION, "yaml"):
        name = re.search(r"^# (conf/\S+\.yaml)", block, flags=re.MULTILINE)
        files[name[1]] = block
    assert set(files) == {
        *("conf/config.yaml", "conf/module/net.yaml", "conf/experiment/first.yaml", "conf/trainer/quick.yaml"),
        "conf/logger/wandb.yaml",
    }
    write(
        tmp_path,
        files
        | {
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
        },
    )
    code, out, err = equipoise("fit", "experiment=first", "trainer=quick", "--cfg", "job")
    assert code == 0, err
    config = yaml.safe_load(out)
    assert (config["trainer"]["limit_train_batches"], config["trainer"]["gradient_clip_val"]) == (10, 1.0)
    assert set(config["callbacks"]) == {
        "model_checkpoint",
        "learning_rate_monitor",
        "step_times",
        "run_summary",
        "run_report",
        "memory_logger",
    }
    assert "wandb" in yaml.safe_load(equipoise("fit", "logger=[csv,wandb]", "--cfg", "job")[1])["logger"]
    quiet = ("trainer.enable_progress_bar=false", "trainer.log_every_n_steps=1", "trainer.max_epochs=1")
    assert equipoise("fit", "experiment=first", "trainer=quick", *quiet)[0] == 0
    assert textwrap.dedent(next(tmp_path.glob("outputs/*/*/config.yaml")).read_text()).count("width: 128") == 1
