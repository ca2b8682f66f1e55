"""Quantised base weights on one device: the run, its checkpoints, and what is refused."""

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from hydra.utils import instantiate
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import equipoise
from equipoise import AdapterCheckpoints, ConfigurationError, Quantization, StepError
from equipoise.app.compose import compose_values
from equipoise.extensions.quantization.quantized_linear import quantized_layers
from tests.extensions.quantization.qlora import QLoRA, blocks, difference, qllama, stored, tokens
from tests.extensions.quantization.runs import fit
from tests.support.equality import assert_equal
from tests.support.lowering import lowering
from tests.support.trainer_runs import refuses, trainer

__all__ = ["lowering"]

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


class Validated(QLoRA):
    """Notes the losses of its validations."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.training_step(batch, batch_idx)))


def trained(kind: Any = "nf4", module: Any = None, **options: Any) -> Any:
    """Return a module that was trained for one epoch with quantised base weights."""
    return fit(module or QLoRA(), Quantization(kind), **options)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        *(("nf4", "64-true"), ("nf4", "bf16-mixed"), ("fp4", "32-true"), ("int8", "32-true"), ("int8", "bf16-mixed")),
    ],
)
def test_adapters_are_those_of_a_training_at_the_stored_values(kind: str, precision: Any) -> None:
    module = trained(kind, precision=precision)
    assert len(quantized_layers(module)) == 5
    plain = QLoRA()
    for name, layer in quantized_layers(module).items():
        plain.get_submodule(name).weight.data = layer.values()  # type: ignore[union-attr]
    fit(plain, precision=precision)
    assert difference(module, plain) == 0
    assert difference(module, QLoRA()) > 0.01


@pytest.mark.parametrize(
    ("kind", "precision"), [("nf4", "bf16-true"), ("fp4", "32-true"), ("int8", "32-true"), ("int8", "bf16-true")]
)
def test_stored_values_are_those_of_the_library(kind: Any, precision: Any) -> None:
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    module = QLoRA().to(dtype)
    weight = module.get_parameter("model.base_model.model.1.up.base_layer.weight").detach().clone()
    trained(kind, module, precision=precision)
    values = quantized_layers(module)["model.base_model.model.1.up.base_layer"].values()
    if kind == "int8":
        layer = nn.Linear(64, 128, bias=False, dtype=dtype)
        layer.weight = nn.Parameter(weight)
        quantize_(layer, Int8WeightOnlyConfig())
        assert torch.equal(values.to(dtype), layer.weight.dequantize())
    else:
        packed, state = quantize_4bit(weight, quant_type=kind, blocksize=64, compress_statistics=True)
        assert torch.equal(values, dequantize_4bit(packed, state))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_base_weights_stay_as_they_are(kind: Any) -> None:
    module = trained(kind, max_steps=0, max_epochs=None)
    before = copy.deepcopy(stored(module))
    assert any(value.dtype in (torch.uint8, torch.int8) for value in before.values())
    trained(kind, module)
    assert_equal(before, stored(module))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_evaluations_see_the_layers_that_train(kind: Any) -> None:
    module = Validated()
    trainer(callbacks=[Quantization(kind)], num_sanity_val_steps=0).fit(module, tokens(), tokens())
    alone = trained(kind, precision="32-true")
    assert difference(module, alone) == 0
    with torch.no_grad():
        assert module.losses == [float(alone.training_step(batch, 0)) for batch in tokens()]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_copies_and_conversions_keep_the_stored_weights(kind: str) -> None:
    model = trained(kind).model
    batch = next(iter(tokens()))[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(quantized_layers(other)) == 5
        assert torch.equal(other(batch), model(batch))
    before = {name: layer.values() for name, layer in quantized_layers(model).items()}
    model.half().double()
    assert_equal(before, {name: layer.values() for name, layer in quantized_layers(model).items()})


def test_the_graph_keeps_no_weight_as_floats() -> None:
    module = trained("int8")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        module.training_step(next(iter(tokens(5))), 0)
    # The first layer needs no gradient of its input.
    assert [tensor.dtype for tensor in kept if tensor.numel() == 64 * 128] == [torch.int8] * 3


@pytest.mark.thorough
def test_gradients_of_inputs_and_biases() -> None:
    layer = quantized_layers(trained("int8"))["model.base_model.model.1.up.base_layer"]
    layer.bias.requires_grad_(True)
    features = torch.randn(2, 3, 64, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, _: layer(x), (features, layer.bias))


@pytest.mark.parametrize(("kind", "precision"), [("nf4", "bf16-true"), ("int8", "32-true")])
def test_adapters_are_merged_into_whole_layers(kind: str, precision: Any) -> None:
    module = trained(kind, precision=precision).eval()
    batch = next(iter(tokens()))[0]
    expected = module(batch)
    with pytest.raises(RuntimeError):
        copy.deepcopy(module.model).merge_and_unload()
    Quantization.dequantize(module)
    assert not quantized_layers(module)
    merged: Any = module.model.merge_and_unload()
    error = 1e-5 if precision == "32-true" else 0.1
    torch.testing.assert_close(merged(batch), expected, rtol=error, atol=error)
    assert {"1.up.weight", "1.down.weight"} <= merged.state_dict().keys()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_llama_trains(kind: str) -> None:
    module = trained(kind, qllama())
    assert len(quantized_layers(module)) == 15
    assert difference(module, qllama()) > 0.01


@pytest.mark.slow
@pytest.mark.usefixtures("lowering")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_compiled_steps_have_the_same_adapters(kind: Any) -> None:
    # A step that stayed eager would warn.
    compiled = trained(kind, precision="32-true", compile=True)
    assert difference(compiled, trained(kind, precision="32-true")) < 1e-6


def test_which_layers_are_quantised() -> None:
    module = QLoRA()
    head: Any = module.model.get_submodule("base_model.model.3")
    head.requires_grad_(True)
    assert trained(module=module).model.get_submodule("base_model.model.3") is head
    named = Quantization("int8", layers=["*.1.*"], exclude=["*.down"])
    fit(QLoRA(), named)
    assert named.quantized == ("model.base_model.model.1.up.base_layer",)
    tied: Any = QLoRA()
    tied.model.base_model.model[3].weight = tied.model.base_model.model[0].weight
    assert len(quantized_layers(trained(module=tied))) == 4


def test_hooks_of_a_layer_are_called() -> None:
    module = QLoRA()
    calls: list[nn.Module] = []
    module.model.get_submodule("base_model.model.3").register_forward_hook(lambda layer, *_: calls.append(layer))
    trained("int8", module)
    assert [type(layer).__name__ for layer in calls] == ["QuantizedLinear"] * 3


class Decomposed(QLoRA):
    """Has DoRA's adapters, which read the weights of the base model without calling its layers."""

    def __init__(self) -> None:
        super().__init__()
        config = LoraConfig(r=4, target_modules=["up", "down"], use_dora=True)
        self.model = get_peft_model(blocks(), config)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_nobody_takes_the_integers_for_values(kind: str) -> None:
    with pytest.raises(RuntimeError, match="size of tensor"):
        trained(kind, Decomposed())


def test_frozen_adapters_stay_whole(tmp_path: Path) -> None:
    trained("int8").model.save_pretrained(tmp_path)
    module = Validated()
    module.model = PeftModel.from_pretrained(blocks(), tmp_path)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    trainer(callbacks=[Quantization("nf4")]).validate(module, tokens(), verbose=False)
    assert len(quantized_layers(module)) == 5


class WithBlocks(QLoRA):
    """Has torch's own blocks, which read the weights of their layers in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(64, 2, 64, batch_first=True).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        embedding: Any = self.model.get_submodule("base_model.model.0")
        return super().forward(tokens) + self.block(embedding(tokens))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def test_blocks_of_torch_stay_whole() -> None:
    module = WithBlocks()
    trainer(callbacks=[Quantization("int8")]).fit(module, tokens(), tokens())
    assert len(quantized_layers(module)) == 5


def untrained() -> QLoRA:
    module = QLoRA()
    module.model.requires_grad_(True)
    return module


@pytest.mark.parametrize(
    ("make", "arguments", "options", "words"),
    [
        (untrained, {}, {}, "nothing to quantise: none of 13 linear layers"),
        (lambda: QLoRA().to("meta"), {}, {}, "on the meta device"),
        (QLoRA, {"layers": ["*.up.base"]}, {}, "'*.up.base' matches no linear layer"),
        (QLoRA, {}, {"callbacks": [EMAWeightAveraging()]}, "EMAWeightAveraging computes the mean of all weights"),
        (QLoRA, {}, {"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging computes the mean"),
        (QLoRA, {"blocksize": 63}, {}, "cpu cannot compute with such weights: "),
        (QLoRA, {}, {"strategy": "ensemble"}, "does not go with strategy='ensemble'"),
        (QLoRA, {"kind": "int4"}, {}, "kind is one of 'nf4', 'fp4', 'int8', not 'int4'"),
        (QLoRA, {"layers": "up"}, {}, "is a list of names"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_quantised_is_refused_before_training(
    make: Any, arguments: Any, options: Any, words: str
) -> None:
    def run() -> None:
        callbacks = [Quantization(**arguments), *options.get("callbacks", [])]
        trainer(**{"devices": 1, **options, "callbacks": callbacks}).fit(make(), tokens())

    refuses(run, words)


def test_an_input_of_integers_is_refused() -> None:
    layer = quantized_layers(trained())["model.base_model.model.3"]
    with pytest.raises(StepError, match=r"received torch\.uint8"):
        layer(torch.zeros(1, 64, dtype=torch.uint8))


@pytest.mark.parametrize(("kind", "package"), [("nf4", "bitsandbytes"), ("int8", "torchao")])
def test_a_missing_package_is_named_with_its_installation(
    kind: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"{package}: pip install 'equipoise\[finetuning\]'"):
        Quantization(kind)


def test_the_command_line_takes_the_callbacks_and_a_precision_of_float8(tmp_path: Path) -> None:
    (tmp_path / "module").mkdir()
    (tmp_path / "module" / "qlora.yaml").write_text("_target_: tests.extensions.quantization.qlora.QLoRA")
    overrides = [
        "module=qlora",
        "callbacks=[quantization,adapter_checkpoints,float8_training]",
        "callbacks.quantization.kind=int8",
        "callbacks.quantization.exclude=['*.head']",
        "callbacks.float8_training.recipe=rowwise",
        "precision=fp8-rowwise",
    ]
    folders = [Path(equipoise.__file__).parent / "conf", tmp_path]
    values = compose_values(overrides, folders, tmp_path)
    assert values["trainer"]["precision"] == "fp8-rowwise"
    callbacks = values["callbacks"]
    quantization = instantiate(callbacks["quantization"])
    assert isinstance(quantization, Quantization)
    assert (quantization.kind, list(quantization.exclude), quantization.layers) == ("int8", ["*.head"], None)
    assert instantiate(callbacks["float8_training"]).recipe == "rowwise"
    assert isinstance(instantiate(callbacks["adapter_checkpoints"]), AdapterCheckpoints)
