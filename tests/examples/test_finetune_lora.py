"""The commands of the example of a language model: base, adapters, exports that others load; and its size."""

import shutil
from pathlib import Path

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'equipoise[finetuning]'")
transformers = pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_lora"
MOST_LINES = 300
QUICK = ["data.characters=20_000", "data.length=32", "trainer.max_epochs=1", "trainer.limit_train_batches=4"]
QUICK += ["trainer.limit_val_batches=2", "trainer.log_every_n_steps=1"]
QUICK += ["trainer.enable_progress_bar=false", "~callbacks.memory_logger"]
TOKENS = torch.arange(64).view(2, 32)

# peft asks transformers by a former name.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # The checkpoint holds the adapters alone.
    pytest.mark.filterwarnings("ignore:Found keys that are in the model state dict:UserWarning"),
]


@pytest.fixture
def run(empty_folder, equipoise, monkeypatch):
    """A function that runs a command in a copy of the example."""
    for name in ("conf", "finetune_lora"):
        shutil.copytree(EXAMPLE / name, empty_folder / name)
    monkeypatch.syspath_prepend(empty_folder)

    def command(*words):
        code, out, err = equipoise(*words)
        assert code == 0, err
        return out

    return command


def fit_and_export(run, name, out, *overrides):
    run("fit", f"experiment={name}", f"hydra.run.dir=outputs/{name}", *QUICK, *overrides)
    path = f"outputs/{name}/checkpoints/best.ckpt"
    run("export", path, out, "--module=finetune_lora.module.LanguageModel")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("devices", [[], ["strategy=fsdp", "trainer.devices=2", "trainer.accelerator=cpu"]])
def test_transformers_and_peft_load_the_result(run, devices):
    fit_and_export(run, "base", "base", *devices)
    for name in ("lora", "qlora"):
        path = fit_and_export(run, name, name, *devices)
        # The adapters alone: the base has 0.46 million parameters of four bytes.
        assert Path(path).stat().st_size < 1_000_000
        from finetune_lora.module import LanguageModel

        ours = LanguageModel.load_from_checkpoint(path).model.eval()
        base = transformers.AutoModelForCausalLM.from_pretrained("base").eval()
        before = base(TOKENS).logits
        loaded = peft.PeftModel.from_pretrained(base, name).eval()
        assert torch.equal(loaded(TOKENS).logits, ours(TOKENS).logits)
        assert not torch.equal(loaded(TOKENS).logits, before)


def test_it_is_short():
    files = [*EXAMPLE.glob("finetune_lora/*.py"), *EXAMPLE.glob("conf/**/*.yaml")]
    assert len(files) > 8
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) < MOST_LINES
