"""Models of transformers and peft, exported, and loaded by these packages: equal outputs to the bit."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from equipoise import AdapterCheckpoints
from equipoise.__main__ import main
from equipoise.extensions.export import export_weights, read_weights
from tests.support.trainer_runs import refuses, trainer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

# peft asks transformers by a former name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TOKENS = torch.arange(12).reshape(2, 6)
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def tied_model(seed: int = 0) -> Any:
    """Return a language model whose head is tied to its embedding."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(vocab_size=12, num_key_value_heads=2, tie_word_embeddings=True, **SIZES)
    return transformers.LlamaForCausalLM(config).double().eval()


class Language(L.LightningModule):
    """Trains the language model, or adapters of it."""

    def __init__(self, rank: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        # The precision of the run makes it double.
        self.model = tied_model(seed).float()
        if rank:
            torch.manual_seed(7)
            self.model = peft.get_peft_model(self.model, peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss * self.scale

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def trained(folder: Path, callbacks: Sequence[Any] = (), **options: Any) -> Language:
    """Return a module after a fit, with its checkpoint in the folder."""
    module = Language(**options)
    run = trainer(max_epochs=2, precision="64-true", callbacks=list(callbacks))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(module, torch.utils.data.DataLoader(TOKENS, batch_size=2))
    run.save_checkpoint(folder / "x.ckpt")
    return module


def outputs(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def command(*arguments: Any) -> int:
    return main(["export", *map(str, arguments)])


@pytest.mark.thorough
def test_a_model_of_transformers(tmp_path: Path) -> None:
    module = trained(tmp_path)
    export_weights(module.model, tmp_path / "model", max_shard_size=12_000)
    # The command makes the module from its class.
    name = f"{Language.__module__}.Language"
    assert command(tmp_path / "x.ckpt", tmp_path / "by_command", f"--module={name}") == 0
    for folder in ("model", "by_command"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert loaded.dtype == torch.float64
        assert torch.equal(outputs(loaded), outputs(module.model))
        body = transformers.AutoModel.from_pretrained(tmp_path / folder)
        assert torch.equal(body(TOKENS).last_hidden_state, module.model.model(TOKENS).last_hidden_state)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) >= 2


def test_weights_alone_beside_a_configuration(tmp_path: Path) -> None:
    """A folder that is streamed, without the module, needs nothing but the configuration."""
    module = trained(tmp_path)
    out = tmp_path / "out"
    assert command(tmp_path / "x.ckpt", out, "--prefix=model", "--max-shard-size=0.02MB") == 0
    assert (out / "model.safetensors.index.json").is_file()
    assert set(read_weights(out)) == set(module.model.state_dict())
    module.model.config.save_pretrained(out)
    loaded, messages = transformers.LlamaForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(messages[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(outputs(loaded), outputs(module.model))


def test_another_dtype_is_that_of_the_configuration(tmp_path: Path) -> None:
    model = tied_model()
    export_weights(model, tmp_path / "out", dtype="bfloat16")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    written = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    assert torch.equal(outputs(loaded), outputs(model.bfloat16()))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("callbacks", [[], [AdapterCheckpoints()]], ids=["all weights", "adapters alone"])
def test_adapters_of_peft(callbacks: Any, tmp_path: Path) -> None:
    module = trained(tmp_path, callbacks, rank=2)
    assert not torch.equal(outputs(module.model), outputs(tied_model()))
    export_weights(module.model, tmp_path / "model")
    name = f"{Language.__module__}.Language"
    assert command(tmp_path / "x.ckpt", tmp_path / "by_command", f"--module={name}") == 0
    for folder in ("model", "by_command"):
        names = {path.name for path in (tmp_path / folder).iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json"} <= names
        assert not {"model.safetensors", "config.json"} & names
        loaded = peft.PeftModel.from_pretrained(tied_model(), str(tmp_path / folder))
        assert torch.equal(outputs(loaded), outputs(module.model))
        modes = {path.stat().st_mode for path in (tmp_path / folder).iterdir()}
        assert len(modes) == 1
    weights = read_weights(tmp_path / "model")
    assert weights
    assert all(".lora_" in name for name in weights)


def test_an_export_replaces_an_export_alone(tmp_path: Path) -> None:
    export_weights(tied_model(), tmp_path / "out")
    refuses(lambda: export_weights(tied_model(1), tmp_path / "out"), "exists already", "overwrite=True")
    export_weights(tied_model(1), tmp_path / "out", overwrite=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(outputs(loaded), outputs(tied_model(1)))
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    refuses(lambda: export_weights(tied_model(), tmp_path / "out", overwrite=True), "'tokenizer.json'")
    assert len(list(tmp_path.iterdir())) == 1


def test_an_export_of_several_adapters_is_replaced(tmp_path: Path) -> None:
    """Peft writes a folder for each adapter but the first."""
    model = Language(rank=2).model
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q_proj"]))
    out = tmp_path / "out"
    export_weights(model, out)
    assert (out / "second" / "adapter_model.safetensors").is_file()
    refuses(lambda: export_weights(model, out), "exists already", "overwrite=True")
    export_weights(model, out, overwrite=True)
    loaded = peft.PeftModel.from_pretrained(tied_model(), str(out / "second"))
    assert loaded.peft_config["default"].r == 3
    (out / "second" / "notes.txt").write_text("of the user")
    refuses(lambda: export_weights(model, out, overwrite=True), "'notes.txt'")


def test_a_model_goes_to_a_local_folder() -> None:
    refuses(lambda: export_weights(tied_model(), "memory://pretrained"), "local folder")


class Unmakeable(Language):
    def __init__(self, needed: Any) -> None:
        super().__init__()


def test_a_module_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path)
    flag = f"--module={Unmakeable.__module__}.Unmakeable"
    assert command(tmp_path / "x.ckpt", tmp_path / "out", flag) == 2
    assert "missing 1 required positional argument: 'needed'" in capsys.readouterr().err
    assert command(tmp_path / "x.ckpt", tmp_path / "out", "--module=pathlib.Path") == 2
    assert "must name a LightningModule" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
