"""Plans of modules that have none: layers that compute the same where they are cut are found, and no others."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from equipoise import Trainer
from equipoise.extensions.fsdp.mesh.plans import finding
from equipoise.extensions.fsdp.mesh.plans.candidates import as_patterns, candidates_of
from equipoise.extensions.fsdp.mesh.plans.trials import Trials
from equipoise.extensions.fsdp.mesh.plans.uses import Group, LayerUses
from tests.conftest import ignoring
from tests.extensions.fsdp.mesh_modules import Heads, SelfAttention
from tests.extensions.fsdp.programs import (
    FEATURES,
    QUIET,
    Block,
    Net,
    assert_close,
    errors_of,
    fit,
    fsdp,
    in_processes,
    loader,
    make,
    weights_of,
)
from tests.extensions.fsdp.test_transparency import ByHand

pytestmark = ignoring(r"\w+ has a `validation_step`, but", "Dropout between cut layers")


# Uses of layers


class Residual(nn.Module):
    """Two layers beside the rest, and an embedding, whose outputs come to several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.gate = nn.Linear(4, 6)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.unused = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        self.unused(hidden)
        normed = self.norm(hidden)
        hidden = hidden + self.down(self.up(input=normed) * self.gate(hidden).relu_())
        return self.last(hidden).sum()


def groups_of(module: nn.Module, inputs: Tensor) -> list[Group]:
    uses = LayerUses(module)
    loss = module(inputs).sum()
    loss.backward()
    return uses.groups(loss)


def test_groups_of_layers() -> None:
    assert groups_of(Residual(), torch.tensor([1, 2])) == [
        Group(["embedding", "down"], ["unused", "up", "gate", "last"], ["norm"]),
        Group(["up", "gate"], ["down"], []),
    ]


def test_layers_that_the_loss_needs_or_that_come_back_to_themselves() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = nn.Linear(4, 4)
            self.seen = nn.Linear(4, 8)
            self.last = nn.Linear(8, 4)

        def forward(self, features: Tensor) -> Tensor:
            hidden = self.seen(self.twice(self.twice(features)))
            return self.last(hidden).sum() + hidden.square().sum()

    assert groups_of(Twice(), torch.ones(2, 4)) == []


# Candidates


def test_candidates_and_the_numbers_that_count_them() -> None:
    module = Heads()
    module.attention.odd = 3  # type: ignore[assignment]
    module.attention.width = 8  # type: ignore[assignment]
    module.attention.head_dim = 2  # type: ignore[assignment]
    module.attention.groups = 2  # type: ignore[assignment]
    attention = Group([f"attention.{name}" for name in ("query", "key", "value")], ["attention.output"], [])
    blocks = [Group([f"blocks.{index}.up"], [f"blocks.{index}.down"], []) for index in range(3)]
    first, second = candidates_of(module, [attention, *blocks], 2)
    assert first.styles == {f"blocks.{index}.{name}": style for index in range(3) for name, style in PAIR.items()}
    assert first.numbers == [[]]
    assert second.styles == {**dict.fromkeys(attention.sources, "colwise"), "attention.output": "rowwise"}
    heads, width, groups = ([f"attention.{name}"] for name in ("heads", "width", "groups"))
    assert second.numbers == [heads, [], heads + width, width, heads + groups, heads + groups + width]
    # Other blocks are candidates by themselves.
    module.blocks[1].up = nn.Linear(7, 20)
    assert len(candidates_of(module, [attention, *blocks], 2)) == 3


PAIR = {"up": "colwise", "down": "rowwise"}


def test_patterns_name_nothing_else() -> None:
    everything = ["0.a.0", "0.a.1", "1.a.0", "1.a.1", "2.b"]
    assert as_patterns(everything, everything) == ["*.a.*", "*.b"]
    assert as_patterns(["0.a.0", "1.a.0"], everything) == ["*.a.0"]
    assert as_patterns(["0.a.1", "2.b"], everything) == ["0.a.1", "*.b"]


# Trainings


class Traps(Net):
    """Pairs of layers that compute something else where they are cut, each beside the rest, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        width = 7
        parts: dict[str, tuple[int, nn.Module]] = {
            "fine": (16, nn.Tanh()),
            "normed": (16, nn.LayerNorm(16)),
            "normalised": (16, nn.Softmax(-1)),
            # Each process would have a part of its gradient.
            "weighted": (16, nn.PReLU()),
            "odd": (15, nn.Tanh()),
            # Nothing of it is seen in the beginning.
            "hidden": (16, nn.Softmax(-1)),
            "leaking": (16, nn.Tanh()),
            "tied": (16, nn.Tanh()),
            "dropped": (16, nn.Dropout(0.0)),
        }
        self.up = nn.ModuleDict({name: nn.Linear(width, wide) for name, (wide, _) in parts.items()})
        self.middle = nn.ModuleDict({name: middle for name, (_, middle) in parts.items()})
        self.down = nn.ModuleDict({name: nn.Linear(wide, width) for name, (wide, _) in parts.items()})
        self.factor = nn.Parameter(torch.zeros(1))
        self.other = nn.Linear(width, 16)
        self.other.weight = self.up["tied"].weight
        self.twice = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        for name, up in self.up.items():
            wide = self.middle[name](up(hidden))
            part = self.down[name](wide)
            if name == "hidden":
                part = part * self.factor
            if name == "leaking":
                part = part + wide.mean(-1, keepdim=True)
            hidden = hidden + part
        hidden = hidden + self.twice(torch.tanh(self.twice(hidden))) + self.other(hidden)[:, :7]
        return self.last(hidden)


class Dropping(Traps):
    """Drops numbers between two layers, others in each process."""

    def __init__(self) -> None:
        super().__init__()
        self.middle["dropped"] = nn.Dropout(0.5)


class AttentionWithNorms(SelfAttention):
    """Norms of queries and keys, by head, whose weights each process has."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.query_norm = nn.RMSNorm(2)
        self.key_norm = nn.RMSNorm(2)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            layer(hidden).unflatten(-1, (self.heads, -1)) for layer in (self.query, self.key, self.value)
        )
        heads = [part.transpose(1, 2) for part in (self.query_norm(query), self.key_norm(key), value)]
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Norms(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.attention = AttentionWithNorms()


class Stream(IterableDataset[Any]):
    """Samples that can be read once."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        features = torch.randn(48, FEATURES, generator=draw, dtype=torch.float64)
        self.samples = iter([(row, row[:1]) for row in features])

    def __iter__(self) -> Iterator[Any]:
        return self.samples


def trained_on_stream(strategy: Any, processes: int) -> Any:
    module = make(Heads)
    trainer = Trainer(strategy=strategy, devices=["cpu"] * processes, precision="64-true", **{**QUIET, "max_epochs": 1})
    trainer.fit(module, DataLoader(Stream(), batch_size=12))
    return weights_of(module)


@contextmanager
def noted_plans() -> Iterator[list[Any]]:
    """Note the plans that are found, in their written form, and why layers are whole."""
    plans: list[Any] = []
    find = finding.find_plan

    def noting(module: Any, *args: Any) -> Any:
        plan = find(module, *args)
        plans.append((finding.written_form(module, plan), plan.reasons))
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, "find_plan", noting)
        yield plans


def outcomes() -> dict[str, Any]:
    """Return weights after trainings, plans that were found, and refusals; called in every process."""
    found: dict[str, Any] = {}
    with noted_plans() as found["plans"]:
        found["traps"] = weights_of(fit(Traps, fsdp(tensor=2), 2, batch_size=12)[0])
        fit(Dropping, fsdp(tensor=2), 2, batch_size=12, max_epochs=1)
        module, _ = fit(Heads, fsdp(tensor=2), 2, batch_size=12)
        found["heads"] = weights_of(module)
        found["number"] = module.attention.heads
        found["in float32"] = weights_of(fit(Heads, fsdp(tensor=2), 2, batch_size=12, precision="32-true")[0])
        found["norms"] = weights_of(fit(Norms, fsdp(tensor=2), 2, batch_size=12)[0])
        found["stream"] = trained_on_stream(fsdp(tensor=2), 2)
    options = {"precision": "64-true", **QUIET}
    trainer = Trainer(strategy=fsdp(tensor=2), devices=["cpu"] * 2, **options)
    (found["evaluated"],) = trainer.validate(make(Heads), loader(7, 3), verbose=False)
    kinds = (ByHand, NoLoss, Lonely)
    return found | errors_of({kind.__name__: partial(fit, kind, fsdp(tensor=2), 2, batch_size=12) for kind in kinds})


class NoLoss(Net):
    """Its first loss is not finite."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) / 0.0


class Lonely(Net):
    """Its layers have odd widths."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()


@pytest.mark.slow
def test_layers_that_are_found_train_as_those_of_one_device() -> None:
    found = in_processes(2, outcomes)
    (traps, reasons), (dropping, _), (heads, _), *others = found["plans"]
    # 1. What is cut.
    assert traps == {
        "up.fine": "colwise",
        "up.dropped": "colwise",
        "down.fine": "rowwise",
        "down.dropped": "rowwise",
    }
    assert dropping == traps
    assert heads == {
        "blocks.*.up": "colwise",
        "attention.query": "colwise",
        "attention.key": "colwise",
        "attention.value": "colwise",
        "blocks.*.down": "rowwise",
        "attention.output": "rowwise",
        "attention.heads": "divided",
    }
    plans = [plan for plan, _ in others]
    norms = dict.fromkeys(["attention.key_norm", "attention.query_norm"], "replicated_with_grad_allreduce")
    assert plans == [heads, {**heads, **norms}, heads]

    # 2. What is not, and why.
    assert reasons["up.normed"].startswith("cut, RuntimeError")
    assert "differs by" in reasons["down.normalised"]
    assert reasons["up.weighted"].startswith("cut, ")
    assert reasons["up.odd"] == "a width of 15 is not divisible by 2"
    assert "differs by" in reasons["up.hidden"]
    assert reasons["up.tied"] == "it shares a weight with other"
    assert reasons.keys().isdisjoint(["up.leaking", "twice"])

    # 3. The same weights.
    assert_close(weights_of(fit(Traps)[0]), found["traps"])
    whole, _ = fit(Heads)
    assert_close(weights_of(whole), found["heads"])
    assert found["number"] == whole.attention.heads
    assert_close(weights_of(fit(Heads, precision="32-true")[0]), found["in float32"], 1e-4)
    assert_close(weights_of(fit(Norms)[0]), found["norms"])
    assert_close(trained_on_stream("single_device", 1), found["stream"])
    (expected,) = Trainer(devices=["cpu"], precision="64-true", **QUIET).validate(
        make(Heads), loader(7, 3), verbose=False
    )
    assert_close(expected, found["evaluated"])

    # 4. What cannot be tried.
    assert "`training_step` runs backwards and optimisers by hand" in found["ByHand"]
    assert "the loss is not finite. Optimisers, and what hooks" in found["NoLoss"]
    assert "cuts no layer, so each process would compute the same" in found["Lonely"]


class FailsInOne(Net):
    """Fails in the second process alone, where the middle of its blocks has received a part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([FailingBlock(7), Block(7)])


class FailingBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        if dist.get_rank() == 1 and isinstance(self.up.weight, DTensor):
            raise MemoryError("no room in this process")
        return super().forward(hidden)


def failing_in_one() -> list[Any]:
    """Return the outcomes of trials, and which weights are cut, in each process; with a timeout of an hour."""
    reasons = []
    find = Trials.reason
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trials, "reason", lambda *args: reasons.append(find(*args)) or reasons[-1])
        fit(FailsInOne, fsdp(tensor=2, timeout=3600.0), 2, batch_size=12, max_epochs=1)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, reasons)
    return found


@pytest.mark.slow
def test_a_trial_that_fails_in_one_process_ends_in_all() -> None:
    first, second = in_processes(2, failing_in_one)
    assert first == second == ["cut, MemoryError: no room in this process", None]


class Watched(Net):
    """Pairs of layers, one of which is seen by a buffer; batches with noise of an own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.up = nn.ModuleDict({name: nn.Linear(7, 16) for name in ("fine", "watched")})
        self.down = nn.ModuleDict({name: nn.Linear(16, 7) for name in ("fine", "watched")})
        self.register_buffer("running", torch.zeros(()))
        self.numbers = torch.Generator().manual_seed(7)
        self.transfers = 0

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        for name, up in self.up.items():
            wide = torch.tanh(up(hidden))
            if name == "watched" and self.training:
                self.running.add_(wide.detach().square().sum())
            hidden = hidden + self.down[name](wide)
        return self.last(hidden)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transfers += 1
        noise = torch.randn(batch[0].shape, generator=self.numbers, dtype=batch[0].dtype)
        return [batch[0] + 0.1 * noise, batch[1]]


def watched() -> tuple[Any, int, list[str], str]:
    """Return the weights, the number of transfers, the plan, and the refusal of a plan that cuts too much."""
    with noted_plans() as plans:
        module, _ = fit(Watched, fsdp(tensor=2), 2, batch_size=12, max_epochs=1)
    ((styles, _),) = plans
    plan = {"up.watched": "colwise", "down.watched": "rowwise"}
    strategy = fsdp(tensor=2, tensor_plan=plan)
    refused = errors_of({"buffer": partial(fit, Watched, strategy, 2, batch_size=12, max_epochs=1)})
    return {**weights_of(module), "running": module.running}, module.transfers, [*styles], refused["buffer"]


@pytest.mark.slow
def test_a_search_changes_nothing_and_sees_buffers() -> None:
    weights, transfers, styles, refusal = in_processes(2, watched)
    alone, _ = fit(Watched, max_epochs=1)
    assert_close({**weights_of(alone), "running": alone.running}, weights)
    assert (transfers, styles) == (alone.transfers, ["up.fine", "down.fine"])
    assert "the buffer 'running' has other values with cut layers" in refusal
