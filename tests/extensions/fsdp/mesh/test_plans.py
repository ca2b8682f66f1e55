"""Modules written for one device, cut by a plan: equal to one device, or whole with the reason."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from equipoise.extensions.fsdp.mesh.plans.cutting import layers_table, reasons_of
from equipoise.extensions.fsdp.mesh.plans.sources import Plan, plan_of_models, written_plan
from tests.extensions.fsdp.mesh_modules import Cut, Heads
from tests.extensions.fsdp.modules import Marked
from tests.extensions.fsdp.programs import (
    STEP,
    Block,
    Net,
    assert_refused_in_processes,
    assert_same_in_processes,
    fit,
    fsdp,
    weights_of,
)
from tests.support.trainer_runs import refuses

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Planned(Heads):
    """States its plan by itself."""

    def tensor_plan(self) -> dict[str, Any]:
        attention = dict.fromkeys((f"attention.{name}" for name in ("query", "key", "value")), "colwise")
        return {**attention, "attention.output": "rowwise", "attention.heads": "divided", **PLAN}


class Language(L.LightningModule):
    """A model of transformers with random weights, tiny, on tokens that are drawn from the features."""

    def __init__(self, kind: str = "Llama", **options: Any) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 30}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
        config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, "use_cache": False, **options})
        self.model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = (batch[0].abs() * 7).long() % 30
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class BlockWithNorm(Block):
    """Has a norm between its layers."""

    def __init__(self) -> None:
        super().__init__(7)
        self.between = nn.LayerNorm(14)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.between(self.up(hidden)))


class NormBetween(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BlockWithNorm() for _ in range(3))


class OtherFeatures(Net):
    """Receives fewer features than it takes."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features[:, :6])


class OfTransformers(Net):
    """Has a plan as models of transformers have one."""

    config = object()

    @property
    def tp_plan(self) -> dict[str, str]:
        return {"blocks.*.up": "colwise", "blocks.*.down": "moe_tp_experts", "blocks.*.norm.bias": "rowwise"}


class Transposed(Net):
    """Its blocks have layers with transposed weights, as those of GPT-2, of which one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers.pytorch_utils")
        for block in self.blocks:
            block.up = transformers.Conv1D(14, 7)
            block.down = transformers.Conv1D(7, 14)
            # Without values, biases would hide what is added twice.
            nn.init.normal_(block.up.bias)
            nn.init.normal_(block.down.bias)
        self.blocks[1].up.requires_grad_(False)


# Names


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"block.*.up": "colwise"}, "FSDPStrategy(tensor_plan=...) has the entry 'block.*.up', which names no sub"),
        ({"blocks.*.heads": "divided"}, "names no number of the module or its submodules"),
        (None, "Net.tensor_plan must be a mapping of names to styles, not Linear"),
    ],
)
def test_entries_that_name_nothing_and_a_plan_that_is_a_submodule_are_refused(plan: Any, words: str) -> None:
    module = Net()
    module.tensor_plan = nn.Linear(2, 2)
    refuses(lambda: written_plan(module, plan), words)


@pytest.mark.parametrize(
    ("pattern", "named"), [("heads", ["heads"]), ("*.heads", ["heads", "attention.heads"])], ids=["a name", "a pattern"]
)
def test_patterns_name_numbers_that_are_divided(pattern: str, named: list[str]) -> None:
    module = Planned()
    module.heads = 4
    assert plan_for(module, {pattern: "divided"}).divided == named


def plan_for(module: Any, option: Any = None) -> Plan:
    plan = written_plan(module, option)
    assert plan is not None
    return plan


def test_the_option_comes_before_the_method() -> None:
    styles = plan_for(Planned(), PLAN).styles
    assert list(styles) == [f"blocks.{index}.{name}" for name in ("up", "down") for index in range(3)]
    plan = plan_for(Planned())
    assert (plan.origin, plan.divided) == ("Planned.tensor_plan", ["attention.heads"])
    assert written_plan(Net(), None) is None


# Layers that stay whole


def test_widths_that_do_not_divide_stay_whole_with_their_neighbours() -> None:
    module = Net()
    module.blocks[1].up = nn.Linear(7, 15)
    plan = plan_for(module, {**PLAN, "first": "colwise_gather_output", "blocks.0.norm": "colwise"})
    reasons = reasons_of(module, plan, 2)
    assert reasons == {
        "blocks.0.norm": "torch.nn.modules.normalization.LayerNorm is no plain nn.Linear or nn.Embedding",
        "blocks.0.up": "norm stays whole",
        "blocks.0.down": "norm stays whole",
        "blocks.1.up": "a width of 15 is not divisible by 2",
        "blocks.1.down": "up stays whole",
        "first": "a width of 7 is not divisible by 2",
    }
    table = layers_table(module, plan, reasons)
    assert "blocks.*.up    1       colwise" in table
    assert "last           1       whole    it is in no plan" in table


def test_layers_that_cannot_be_cut_stay_whole() -> None:
    module = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("tied", "also", "buffered", "meta", "grouped")})
    module["also"].weight = module["tied"].weight
    module["buffered"].register_buffer("factor", torch.ones(1))
    module["meta"].to("meta")
    module.head_dim = 4  # type: ignore[assignment]
    module["normed"] = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    module["limited"] = nn.Embedding(4, 4, max_norm=1.0)
    module["never called"] = nn.MultiheadAttention(4, 2).out_proj
    reasons = reasons_of(module, Plan("", dict.fromkeys(module, "colwise_gather_output"), [], {}), 2)
    for name in ("normed", "limited", "never called"):
        assert "is no plain nn.Linear or nn.Embedding" in reasons.pop(name)
    assert reasons == {
        "tied": "it shares a weight with also",
        "also": "it shares a weight with tied",
        "buffered": "it has buffers, which torch would cut as well",
        "meta": "its weights have no values yet",
        "grouped": "1 heads are not divisible by 2",
    }


def test_models_have_the_plans_of_transformers() -> None:
    module = nn.ModuleDict({"net": Net(), "other": nn.Linear(2, 2)})
    assert plan_of_models(module) is None
    module = nn.ModuleDict({"net": OfTransformers(), "other": nn.Linear(2, 2)})
    plan = plan_of_models(module)
    assert plan is not None
    assert plan.styles == dict.fromkeys((f"net.blocks.{index}.up" for index in range(3)), "colwise")
    assert plan.reasons["net.blocks.1.down"] == "torch has no style for 'moe_tp_experts'"
    assert plan.reasons["net.blocks.2.norm.bias"] == "it is a parameter"
    assert reasons_of(module, plan, 2)["net.blocks.0.up"] == "down stays whole"


def test_numbers_of_layers_that_stay_whole_are_not_divided() -> None:
    module = Heads()
    names = dict.fromkeys((f"attention.{name}" for name in ("query", "key", "value")), "colwise")
    plan = Plan("", {**names, "attention.output": "rowwise"}, ["attention.heads"], {})
    reasons = reasons_of(module, plan, 3)
    assert reasons.keys() == plan.styles.keys()
    assert "layers that it counts stay whole" in layers_table(module, plan, reasons)
    module.attention.key.weight = module.attention.query.weight
    assert reasons_of(module, plan, 2).keys() == plan.styles.keys()


def test_widths_of_transposed_weights_are_those_of_the_layer() -> None:
    module = Transposed()
    for option, width in (({"blocks.0.up": "colwise"}, 14), ({"blocks.0.up": "rowwise"}, 7)):
        assert reasons_of(module, plan_for(module, option), width) == {}
        assert "is not divisible by 6" in reasons_of(module, plan_for(module, option), 6)["blocks.0.up"]


# Trainings


class MadeLate(Planned):
    """Its hook makes the attention, once."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = [self.attention]
        del self.attention

    def configure_model(self) -> None:
        if not hasattr(self, "attention"):
            self.attention = self.spare[0]


STYLES: dict[str, Any] = {"blocks.*.up": ColwiseParallel(use_local_output=False), "blocks.*.down": RowwiseParallel()}
# The module on one device, the one with the plan, the plan as an option, and the largest difference.
PLANNED: dict[str, tuple[Any, Any, Any, float]] = {
    "by the option": (Net, Net, PLAN, 1e-12),
    # Once more, with heads as before.
    "by the method": (Heads, Planned, None, 1e-12),
    "layers made late": (Heads, MadeLate, None, 1e-12),
    "marked parameters": (Marked, Marked, PLAN, 1e-12),
    "transposed weights": (Transposed, Transposed, PLAN, 1e-12),
    "transposed weights by styles of torch": (Transposed, Transposed, STYLES, 1e-12),
    # Norms of these models compute in float32. There a difference of 1e-16 is one of 6e-8 where a number is rounded up
    # in one run and down in the other. Weights differ by 1e-9 at most then, and by 1e-17 without such a number.
    "Llama": (Language, Language, None, 1e-8),
    "Qwen2": (*[partial(Language, "Qwen2", tie_word_embeddings=True)] * 2, None, 1e-8),
}


def trained(kind: Any, *strategy: Any) -> list[Any]:
    """Return the weights of a fit, those of a second one, and the number of heads."""
    options: dict[str, Any] = {"batch_size": STEP, "count": 25, "max_epochs": 1}
    module, _ = fit(kind, *strategy, **options)
    first = weights_of(module)
    fit(kind, *strategy, module=module, **options)
    return [first, weights_of(module), getattr(getattr(module, "attention", None), "heads", 0)]


@pytest.mark.slow
def test_training_by_a_plan_equals_that_of_one_device() -> None:
    """Models of transformers are cut by their own plans."""
    for tolerance in (1e-12, 1e-8):
        cases = {name: case for name, case in PLANNED.items() if case[-1] == tolerance}
        expected = {name: partial(trained, whole) for name, (whole, *_) in cases.items()}
        calls = {
            name: partial(trained, kind, fsdp(tensor=2, tensor_plan=plan), 2)
            for name, (_, kind, plan, _) in cases.items()
        }
        assert_same_in_processes(2, expected, calls, tolerance)


REFUSED: dict[str, tuple[Any, Any, Sequence[str]]] = {
    "cut twice": (Cut, PLAN, ["FSDPStrategy(tensor_plan=...) would cut once more"]),
    "nothing cut": (
        Net,
        {"first": "colwise_gather_output"},
        ["cuts no layer", "first stays whole: a width of 7 is not divisible by 2."],
    ),
    "no plan": (
        Net,
        None,
        [
            *("FSDPStrategy(tensor_plan={", "a method `Net.tensor_plan`"),
            "`configure_model`, by `parallelize_module`",
        ],
    ),
    "the first of two layers": (
        Net,
        {"blocks.*.up": "colwise"},
        [
            "blocks.0.down (Linear) takes 14 features in the last dimension, and",
            "has received 7: a layer before it is cut",
        ],
    ),
    "the second of two layers": (
        Net,
        {"blocks.*.down": "rowwise"},
        ["blocks.0.down (Linear) takes 14 features in the last dimension", "has received 28: it is cut"],
    ),
    "a norm between": (NormBetween, PLAN, ["blocks.0.between (LayerNorm) takes 14 features"]),
    "another fault": (OtherFeatures, PLAN, ["This was in first (Linear)"]),
    "one of three": (Planned, {"attention.query": "colwise"}, ["This was in attention (SelfAttention)"]),
}


@pytest.mark.slow
def test_a_plan_that_lacks_a_layer_is_refused_with_its_name_and_width() -> None:
    runs = {
        name: partial(fit, kind, fsdp(tensor=2, tensor_plan=plan), 2, batch_size=STEP)
        for name, (kind, plan, _) in REFUSED.items()
    }
    assert_refused_in_processes(2, runs, REFUSED)
