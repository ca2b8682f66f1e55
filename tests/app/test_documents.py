"""The first module of README.md is short, and the project of docs/configuration.md is composed as the page says."""

import re
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks.pages import ROOT, blocks_of


def test_the_first_module_of_the_readme_is_short():
    (block,) = (block for block in blocks_of(ROOT / "README.md") if block.language == "python")
    module = block.source[block.source.index("class Classifier") : block.source.index("\nimages, labels")]
    assert len(module.strip().splitlines()) <= 20


@pytest.mark.thorough
@pytest.mark.whole_package
def test_the_project_in_the_documentation(tmp_path, equipoise, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = blocks_of(ROOT / "docs" / "configuration.md")
    blocks = [block.source for block in page if block.language == "yaml"]
    files = {re.search(r"^# (conf/\S+\.yaml)", block, flags=re.MULTILINE)[1]: block for block in blocks}
    assert set(files) == {
        *("conf/config.yaml", "conf/module/net.yaml", "conf/experiment/first.yaml", "conf/trainer/quick.yaml"),
        "conf/logger/wandb.yaml",
    }
    files["conf/data/images.yaml"] = "_target_: my_project.data.Images\n"
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    code, out, err = equipoise("fit", "experiment=first", "trainer=quick", "logger=[csv,wandb]", "--cfg", "job")
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
