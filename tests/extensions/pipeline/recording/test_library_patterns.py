"""Patterns in forwards of libraries: each is followed, or the submodule that has it stays whole; never wrongly."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from equipoise import ConfigurationError, StepError
from equipoise.extensions.pipeline.graph.stages import may_cut
from equipoise.extensions.pipeline.recording.tracing import NotTraceable
from tests.support.nested import Checked
from tests.support.networks.layers import network as written
from tests.support.traces import WIDTH, Block, assert_computes, assert_followed, block, called, run, traced, values

# Sizes, kinds and masks.


def loops_over_sizes(self: Block, x: Tensor) -> Tensor:
    for size in x.shape[-2:]:
        x = x * size if size > 3 else x + size
    return x


def checks_the_dtype(self: Block, x: Tensor) -> Tensor:
    if x.dtype is not self.first.weight.dtype or x.device != self.first.weight.device:
        raise ValueError("another dtype")
    return x.reshape(len(x), -1).reshape(x.size())


def causal_mask(self: Block, x: Tensor) -> Tensor:
    length = x.size(1)
    mask = torch.full((length, length), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
    # The answer follows from sizes alone.
    if not bool((mask == 0).all()):
        x = torch.softmax(x @ x.transpose(1, 2) + mask, -1) @ x
    return x


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("pattern", [loops_over_sizes, checks_the_dtype, causal_mask])
def test_sizes_and_kinds_are_answered_truly(pattern):
    """Another size is another trace."""
    network = block(pattern)
    made = assert_followed(network, values(2, 4, WIDTH))
    assert made.opaque == {}
    assert_computes(made, network, values(2, 4, WIDTH))
    assert not made.fits([values(2, 3, WIDTH)])
    assert_followed(network, values(2, 3, WIDTH))


def test_sizes_that_nobody_asks_for_do_not_matter():
    network = block(lambda self, x: x.flatten(1).unflatten(1, (-1, WIDTH)) * 2)
    made = assert_followed(network, values(2, 4, WIDTH))
    assert_computes(made, network, values(5, 3, WIDTH))


def leaves_out_what_masks_nothing(self: Block, x: Tensor, mask: Tensor) -> Tensor:
    x = self.first(x)
    if mask.ndim == 2 and not mask.all():
        x = x.masked_fill(mask[..., None] == 0, 0.0)
    return self.last(x)


def test_a_value_of_the_arguments_is_asked_again_before_each_call():
    inner = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, WIDTH)}
    network = written(leaves_out_what_masks_nothing, **inner).double()
    x, ones = values(2, 4, WIDTH), torch.ones(2, 4)
    padded = ones.clone()
    padded[0, 2:] = 0
    made = assert_followed(network, x, ones)
    assert not made.fits([x, padded])
    other = assert_followed(network, x, padded)
    assert not other.fits([x, ones])
    assert other.fits([x, padded.flip(0)])
    assert_computes(other, network, x, padded.flip(0))
    assert len(other.calls) > len(made.calls)


# Outputs and arguments of any class.


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A dataclass that is an ordered mapping, too."""

    hidden: Any = None
    pooled: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Encoder(Block):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        return ModelOutput(hidden=hidden, pooled=hidden.mean(1))


class OpaqueEncoder(Encoder):
    def pattern(self, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) > -1e9 else -x


@pytest.mark.parametrize("encoder", [Encoder, OpaqueEncoder])
def test_outputs_that_are_dataclasses_and_mappings(encoder):
    def forward(self: Any, x: Tensor) -> Any:
        output = self.encoder(x)
        return ModelOutput(hidden=self.head(output["hidden"]), pooled=output.pooled)

    network = written(forward, encoder=encoder(), head=nn.Linear(WIDTH, WIDTH)).double()
    made = assert_followed(network, values(2, 4, WIDTH))
    assert list(made.opaque) == ([] if encoder is Encoder else ["encoder"])


class Cache:
    """Collects what layers compute, as caches of keys and values do."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []

    def update(self, index: int, key: Tensor) -> Tensor:
        self.layers.append({"key": key})
        return self.layers[index]["key"]


def cached(*layers: nn.Module) -> nn.Module:
    """Layers that receive a cache."""

    def forward(self: Any, x: Tensor) -> Any:
        cache = Cache()
        for index, layer in enumerate(self.layers):
            x = layer(x, cache, index)
        return x, cache

    return written(forward, layers=nn.ModuleList(layers)).double()


class CachedLayer(Block):
    def forward(self, x: Tensor, cache: Cache, index: int) -> Tensor:  # type: ignore[override]
        return self.last(x + cache.update(index, self.first(x)))


class AskingCachedLayer(CachedLayer):
    def forward(self, x: Tensor, cache: Cache, index: int) -> Tensor:  # type: ignore[override]
        assert float(x.detach().sum()) < 1e9
        return super().forward(x, cache, index)


def test_objects_that_collect_tensors():
    made = assert_followed(cached(CachedLayer(), CachedLayer()), values(2, WIDTH))
    assert made.opaque == {}


def test_an_object_that_a_whole_module_fills_is_refused():
    with pytest.raises(NotTraceable, match="hands on a Cache, whose tensors cannot be followed"):
        traced(cached(CachedLayer(), AskingCachedLayer()), values(2, WIDTH))


def between(inner: nn.Module) -> nn.Module:
    """Two layers, and what may stay whole between them."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH)).double()


# What may change from call to call.


def draws_from_its_own(self: Block, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return x + torch.rand(x.shape, generator=generator, dtype=x.dtype)


def asks_for_a_dynamic_size(self: Block, x: Tensor) -> Tensor:
    positive = x[x > 0]
    return x * positive.numel()


def maps_over_samples(self: Block, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda sample: sample * sample.sum())(x)


def goes_backward(self: Block, x: Tensor) -> Tensor:
    """As models of energies do."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(torch.tanh(self.first(leaf)).sum(), leaf, create_graph=True)
    return x + gradient


def checkpoints_reentrantly(self: Block, x: Tensor) -> Tensor:
    return checkpoint(torch.tanh, x, use_reentrant=True)


def fails(self: Block, x: Tensor) -> Tensor:
    """Ask for a value, and perhaps fail."""
    if float(x.detach().sum()) > 0:
        raise ValueError("positive")
    return x


def catches(self: Any, x: Tensor) -> Tensor:
    try:
        return self.inner(x)
    except ValueError:
        return self.other(x)


class Checkpointed(Block):
    """Checkpoints where it is called, as layers of transformers do."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)


class Tells(torch.autograd.Function):
    """Returns a number beside a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.clone(), bool(x.sum() > 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def decides_by_a_function(self: Block, x: Tensor) -> Tensor:
    x, is_positive = Tells.apply(x)
    return x * (2 if is_positive else 3)


def goes_through_parts(self: Block, x: Tensor) -> Tensor:
    """Divide a tensor whose size follows from values."""
    chosen = x[x[:, 0] >= x[:, 0].mean()]
    return x + torch.stack([part.sum(0) for part in chosen.split(2)]).sum(0)


STAYS_WHOLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "draws from its own generator": (lambda: block(draws_from_its_own), ""),
    "asks for a dynamic size": (lambda: block(asks_for_a_dynamic_size), ""),
    "maps over samples": (lambda: block(maps_over_samples), ""),
    "goes backward": (lambda: block(goes_backward), ""),
    "checkpoints": (Checkpointed, ""),
    "decides by a number": (lambda: block(decides_by_a_function), "Tells returns a bool, which may change"),
    "a number of parts": (lambda: block(goes_through_parts), "a number of tensors which depends on values"),
    "catches an error of a layer": (lambda: block(catches, inner=block(fails), other=nn.Linear(WIDTH, WIDTH)), ""),
}


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("case", STAYS_WHOLE)
def test_submodules_whose_calls_would_not_do_the_same_again_stay_whole(case):
    make, reason = STAYS_WHOLE[case]
    network = between(make())
    made = assert_followed(network, values(WIDTH, WIDTH))
    assert list(made.opaque) == ["1"]
    assert reason in made.opaque["1"]
    for _ in range(3):
        assert_computes(made, network, values(WIDTH, WIDTH))


def test_reentrant_checkpointing_is_refused():
    """A submodule with it could stay whole, but the gradients of its stage could not be computed."""
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), block(checkpoints_reentrantly)).double()
    with pytest.raises(ConfigurationError, match="use_reentrant=True cannot compute the gradients of a stage"):
        assert_followed(network, values(3, WIDTH))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_reentrant_checkpointing_of_frozen_layers_stays_whole():
    """No gradient passes it."""
    frozen = block(checkpoints_reentrantly).requires_grad_(False)
    network = nn.Sequential(frozen, nn.Linear(WIDTH, WIDTH)).double()
    made = traced(network, values(3, WIDTH))
    assert list(made.opaque) == ["0"]


def writes_in_place(self: Block, x: Tensor) -> Tensor:
    shifted = torch.zeros_like(x)
    shifted[:, 1:] = x[:, :-1].clone()
    shifted.mul_(2)
    shifted += x
    return shifted


def without_gradients(self: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True)
    return x / (1 + scale)


def power_in_place(self: Block, x: Tensor) -> Tensor:
    x = x * 2
    x **= 3
    return x


class Options:
    """An argument that a graph holds as an object."""

    factor = 3.0


class Reversal(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a negative number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | Options) -> Tensor:
        ctx.factor = factor if isinstance(factor, float) else factor.factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.factor * gradients[0], None


CONSTANT = torch.arange(WIDTH, dtype=torch.float64)
PATTERNS = {
    "selects": lambda self, x: torch.index_put(x, (x > 0,), x[x > 0] * 3),
    "writes in place": writes_in_place,
    "without gradients": without_gradients,
    "an activation that it makes": lambda self, x: nn.GELU()(x),
    "a constant of the file": lambda self, x: x * CONSTANT,
    "powers": lambda self, x: x**2 + 2**x,
    "a power in place": power_in_place,
    "a custom backward": lambda self, x: Reversal.apply(x, 2.0),
    "a custom backward with an object": lambda self, x: Reversal.apply(x, Options()),
    "a custom function of a constant": lambda self, x: x + Reversal.apply(CONSTANT, 1.0),
}


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_recorded_calls_hold_for_other_values(pattern):
    network = block(pattern)
    made = assert_followed(network, values(4, WIDTH))
    assert made.opaque == {}
    for _ in range(3):
        assert_computes(made, network, values(4, WIDTH))


def test_whether_a_value_requires_a_gradient_is_asked_again():
    def stops(self: Block, x: Tensor) -> Tensor:
        return x * 2 if x.requires_grad else x

    network, x = block(stops), values(2, WIDTH)
    made = assert_followed(network, x)
    network.first.requires_grad_(False)
    assert not made.fits([x])
    assert_followed(network, x)


# Libraries.


class PreparesAtFirst(Block):
    """Sets an attribute and registers a hook in its first call, as libraries do that collect what layers return."""

    is_ready = False

    def pattern(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.last.register_forward_hook(lambda module, args, output: output * 2)
            self.is_ready = True
        return x


def counts_calls(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x


def test_what_only_the_first_call_sets_is_no_side_effect():
    network = nn.Sequential(PreparesAtFirst(), block(counts_calls, calls=0)).double()
    for _ in range(2):
        made = assert_followed(network, values(2, WIDTH))
        assert list(made.opaque) == ["1"]
        assert "sets the attribute 'calls'" in made.opaque["1"]
        assert "0.first" in called(made)
        assert network[0].is_ready
        assert len(network[0].last._forward_hooks) == 1


def translates(self: Any, source: Tensor, lengths: Tensor, target: Tensor) -> Any:
    packed = pack_padded_sequence(self.embedding(source), lengths.cpu(), batch_first=True, enforce_sorted=False)
    output, state = self.encoder(packed)
    encoded, _ = pad_packed_sequence(output, batch_first=True, total_length=self.total_length)
    decoded, _ = self.decoder(self.embedding(target), state)
    return decoded, encoded


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("total_length", [None, 9])
def test_packed_sequences_of_other_lengths(total_length):
    encoder, decoder = (nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2))
    inner = {"encoder": encoder, "decoder": decoder, "embedding": nn.Embedding(20, WIDTH)}
    network = written(translates, total_length=total_length, **inner).double()
    source, target = torch.randint(0, 20, (4, 7)), torch.randint(0, 20, (4, 5))
    made = assert_followed(network, source, torch.tensor([7, 3, 5, 2]), target)
    assert made.opaque == {}
    # The longest sequence is shorter.
    assert_computes(made, network, source, torch.tensor([4, 4, 1, 2]), target)


def fills(self: Any, x: Tensor, memory: Any) -> Tensor:
    """Ask for a value, so stay whole, and put a tensor into what is received."""
    float(x.detach().sum())
    if isinstance(memory, dict):
        memory["mean"] = x.detach().mean()
    else:
        memory.append(x.detach().mean())
    return self.layer(x)


@pytest.mark.parametrize(
    ("memory", "is_new"),
    [({}, True), ({"mean": 1}, False), ([], False), ([1.0], True)],
    ids=str,
)
def test_layers_that_change_what_they_receive(memory: Any, is_new: bool):
    def hands_on(self: Any, x: Tensor) -> Tensor:
        return self.fills(x, type(self.memory)(self.memory) if is_new else self.memory)

    network = block(hands_on, fills=written(fills, layer=nn.Linear(WIDTH, WIDTH)), memory=memory)
    with pytest.raises(NotTraceable, match=f"Network changes a {type(memory).__name__} that it receives"):
        traced(network, values(2, WIDTH))
    # Around it the network is followed.
    made = traced(between(network), values(2, WIDTH))
    assert list(made.opaque) == ["1"]


def stacked(self: Any, x: Tensor, lengths: Tensor) -> Any:
    """A packed sequence between recurrent layers, which is also the output; and another named tuple."""
    packed = pack_padded_sequence(self.first(x), lengths.cpu(), enforce_sorted=False)
    hidden, _ = self.lstm(packed)
    hidden, state = self.gru(hidden)
    checked = Checked(self.last(state))
    return Checked(self.last(checked.values) * checked.signs), hidden


def test_named_tuples_whose_constructors_check_pass_from_stage_to_stage():
    inner = {"lstm": nn.LSTM(WIDTH, WIDTH), "gru": nn.GRU(WIDTH, WIDTH)}
    linears = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "last")}
    network = written(stacked, **inner, **linears).double()
    made = assert_followed(network, values(4, 3, WIDTH), torch.tensor([2, 4, 1]))
    assert made.opaque == {}
    may = dict(zip((str(node.target) for node in made.calls[1:]), may_cut(made), strict=False))
    assert may["network.lstm"]
    assert may["network.gru"]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_transformers_of_torch_are_cut_within_their_layers():
    network = nn.Transformer(WIDTH, 2, 2, 2, 8, dropout=0.0, batch_first=True, norm_first=True).double()
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    padding = torch.zeros(2, 4, dtype=torch.float64).masked_fill(torch.arange(4) > 2, -torch.inf)
    made = assert_followed(
        network, values(2, 4, WIDTH), values(2, 5, WIDTH), tgt_mask=mask, src_key_padding_mask=padding
    )
    assert {"encoder.layers.1.linear1", "decoder.layers.1.multihead_attn"} <= set(called(made))


# What the calls alone would do otherwise.


def test_a_question_without_an_answer_is_another_trace(capsys):
    def indexes(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x) * (2 if bool(mask[1]) else 3)

    network = written(indexes, layer=nn.Linear(WIDTH, WIDTH)).double()
    made = assert_followed(network, values(2, WIDTH), torch.ones(3))
    assert not made.fits([values(2, WIDTH), torch.ones(1)])
    # Torch writes tracebacks of its programs, though this error is an answer.
    assert capsys.readouterr() == ("", "")
    assert not made.fits([values(2, WIDTH), torch.zeros(3)])


def test_an_attribute_that_a_forward_reads_is_compared_before_each_call():
    def switched(self: Any, x: Tensor) -> Tensor:
        return x * 2 if self.use_scale else x

    network, x = (
        nn.Sequential(block(switched, use_scale=True, steps=0), nn.Linear(WIDTH, WIDTH)).double(),
        values(2, WIDTH),
    )
    made = assert_followed(network, x)
    network[0].steps += 1  # which the forward does not read
    assert made.fits([x])
    network[0].use_scale = False
    assert not made.fits([x])
    assert_followed(network, x)


class Logs(L.LightningModule):
    def forward(self, x: Tensor) -> Tensor:
        self.log("mean", x.mean())
        return x


def test_a_value_that_is_logged_is_not_lost():
    with pytest.raises(NotTraceable, match=r"self.log\(.*logs a value, which only the step itself may do"):
        traced(Logs(), values(2, WIDTH))


def test_autocast_that_is_off_stays_off():
    def exact(self: Block, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.first.weight.float()

    network, x = block(exact).float(), torch.randn(4, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        made = traced(network, x)
        output = run(made, x)
        assert torch.equal(output, network(x))


def chooses(self: Any, x: Tensor) -> Tensor:
    """Hand each sample to the layer that it chooses."""
    output, chosen = torch.zeros_like(x), x[:, :3].argmax(-1)
    for index, layer in enumerate(self.layers):
        rows = (chosen == index).nonzero().squeeze(-1)
        if len(rows):
            output = output.index_add(0, rows, layer(x[rows]))
    return output[x[:, 0] > 0] if self.drops else output


def with_experts(*, drops: bool = False) -> nn.Module:
    """A network that asks for the sizes of what its experts return."""

    def asks_for_sizes(self: Any, x: Tensor) -> Tensor:
        x = self.experts(x)
        return x.reshape(x.shape[0], -1)

    experts = written(chooses, drops=drops, layers=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    return block(asks_for_sizes, experts=experts)


def test_a_network_around_experts_is_recorded():
    network = nn.Sequential(with_experts(), with_experts())
    made = assert_followed(network, values(8, WIDTH))
    assert list(made.opaque) == ["0.experts", "1.experts"]
    for _ in range(3):
        assert_computes(made, network, values(8, WIDTH))


def test_sizes_that_follow_from_values_are_checked_in_each_call():
    network, x = with_experts(drops=True), values(8, WIDTH)
    made = traced(network, x)
    assert torch.equal(run(made, x), network(x))
    hidden = network.first(x)
    others = (values(8, WIDTH) for _ in range(100))
    other = next(other for other in others if (network.first(other)[:, 0] > 0).sum() != (hidden[:, 0] > 0).sum())
    with pytest.raises(StepError, match="sizes that depend on values, and the code"):
        run(made, other)
