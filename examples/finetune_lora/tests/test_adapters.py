"""Adapters: a base that does not move, the same weights on one device and on two, and compiled as they are."""

import pytest
import torch
from finetune_lora.module import LanguageModel
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM

from equipoise import Quantization

# peft asks transformers by a former name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def trained(module):
    """The weights of the adapters, by name."""
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def quantization(kind):
    """Callbacks that store the frozen layers in few bits, or none."""
    if kind is None:
        return []
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'equipoise[finetuning]'")
    return [Quantization(kind)]


def difference(module, other):
    others = trained(other)
    return max((weight - others[name]).abs().max().item() for name, weight in trained(module).items())


def test_only_the_adapters_train(base, data):
    module = LanguageModel(base=base, lora={"r": 4, "target_modules": "all-linear"})
    # Seven linear layers in each of two layers, and two matrices beside each.
    assert len(trained(module)) == 2 * 7 * 2
    assert all("lora_" in name for name in trained(module))
    (group,) = module.configure_optimizers().param_groups
    assert len(group["params"]) == len(trained(module))
    # At first they change nothing.
    batch = default_collate([data.train[0], data.train[1]])
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(module.model(**batch).logits, plain(**batch).logits)
    assert module.model.training


def test_the_base_does_not_move(adapted, base):
    module = adapted()
    plain = AutoModelForCausalLM.from_pretrained(base).double().state_dict()
    kept = module.model.unload().state_dict()
    assert kept.keys() == plain.keys()
    assert all(torch.equal(weight, plain[name]) for name, weight in kept.items())


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "nf4"), ("fsdp", None)])
def test_two_processes_compute_as_one(adapted, strategy, kind):
    expected = adapted(callbacks=quantization(kind))
    actual = adapted(strategy, callbacks=quantization(kind))
    assert difference(actual, expected) < 1e-10
    frozen = expected.state_dict()
    assert all(torch.equal(value, frozen[name]) for name, value in actual.state_dict().items() if "lora_" not in name)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), [("single_device", None), ("fsdp", "nf4")])
def test_compiled_blocks_compute_the_same(adapted, strategy, kind):
    # The norms of a Llama are in float32, so in float64 its blocks would stay eager, with a warning.
    eager = adapted(callbacks=quantization(kind), precision="32-true")
    compiled = adapted(
        strategy, callbacks=quantization(kind), precision="32-true", compile={"dynamic": False, "backend": "aot_eager"}
    )
    assert difference(compiled, eager) < 1e-5
