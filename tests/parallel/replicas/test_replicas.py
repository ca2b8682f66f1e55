"""Copies have the structure and values of the module, share what is no part of it, and give back what they learnt."""

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from equipoise.errors import ConfigurationError, StepError
from equipoise.parallel.replicas.replicable import check_replicable
from equipoise.parallel.replicas.replicas import Replicas

CPU, META = torch.device("cpu"), torch.device("meta")


def copies(module: nn.Module, count: int = 2) -> Replicas:
    """A module and its copies, ready for a step."""
    made = Replicas(module, [CPU] * (count + 1))
    made.refresh(range(count + 1))
    return made


def weights(module: nn.Module) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in module.parameters()]


class Whole(nn.Module):
    """Has attributes of all kinds that refer to it and to its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(3)
        self.layers = [self.first, self.second]
        self.by_name = {"first": self.first, "other": 3}
        self.ordered = OrderedDict(second=self.second)
        self.counts = defaultdict(list, of=[self.norm])
        self.pair = (self.first.weight, [self.norm.running_mean])
        self.step = self.forward
        self.itself = weakref.ref(self)
        self.plain = {"a": [1, 2]}
        self.function = torch.relu
        self.nothing = None
        self.number = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](torch.relu(self.norm(self.layers[0](x))))


# Structure


@pytest.mark.parametrize(
    "make",
    [
        Whole,
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Dropout()),
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
        lambda: nn.ModuleDict({"a": nn.ParameterList([torch.ones(2)]), "b": nn.ParameterDict({"c": torch.ones(1)})}),
        lambda: parametrize.register_parametrization(nn.Linear(3, 3), "weight", nn.Identity()),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        nn.Identity,
    ],
)
def test_a_copy_has_the_same_structure(make: Callable[[], nn.Module]) -> None:
    module = make()
    module.train()
    replica = copies(module)[1]
    assert type(replica) is type(module)
    assert [(n, type(m)) for n, m in replica.named_modules()] == [(n, type(m)) for n, m in module.named_modules()]
    for get in (nn.Module.named_parameters, nn.Module.named_buffers):
        own, originals = dict(get(replica)), dict(get(module))
        assert list(own) == list(originals)
        for name, tensor in own.items():
            assert type(tensor) is type(originals[name])
            assert tensor is not originals[name]
            assert tensor.data_ptr() != originals[name].data_ptr() or not tensor.numel()
            assert torch.equal(tensor, originals[name])
            assert tensor.requires_grad is originals[name].requires_grad
    assert list(replica.state_dict()) == list(module.state_dict())
    assert repr(replica) == repr(module)


def test_the_first_is_the_module_itself() -> None:
    module = Whole()
    replicas = copies(module)
    assert replicas[0] is module
    assert len({id(replicas[index]) for index in range(3)}) == 3


def test_copies_are_made_when_they_are_needed() -> None:
    replicas = Replicas(Whole(), [CPU] * 3)
    replicas.refresh([0, 2])
    made = replicas[2]
    replicas.refresh([0, 1, 2])
    assert replicas[2] is made


def test_copies_lie_on_their_device() -> None:
    replicas = Replicas(Whole(), [CPU, META])
    replicas.module.device = CPU
    replicas.refresh([0, 1])
    replica = replicas[1]
    tensors = [*replica.parameters(), *replica.buffers()]
    assert {tensor.device for tensor in tensors} == {META}
    assert replica.device == META
    assert replica(torch.zeros(2, 3, device=META)).device == META


def test_modules_without_parameters_and_none_among_parts() -> None:
    module = nn.Linear(2, 2, bias=False)
    module.register_module("absent", None)
    module.register_buffer("empty", None)
    replica = copies(module)[1]
    assert replica.bias is None
    assert replica.absent is None
    assert replica.empty is None
    assert copies(nn.Sequential(nn.ReLU(), nn.ReLU()))[1](torch.tensor(-1.0)) == 0


def test_what_is_tied_stays_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
            self.head.weight = self.embedding.weight
            self.again = self.head
            self.register_buffer("mask", torch.ones(2))
            self.head.register_buffer("mask", self.mask)

    module = Tied()
    replicas = copies(module)
    replica = replicas[1]
    assert replica.head.weight is replica.embedding.weight
    assert replica.again is replica.head
    assert replica.mask is replica.head.mask
    with torch.no_grad():
        module.head.weight.add_(1)
    module.mask.add_(1)
    replicas.refresh([0, 1])
    assert torch.equal(replica.embedding.weight, module.embedding.weight)
    assert replica.mask.tolist() == [2, 2]
    replica.head(replica.embedding(torch.tensor([1, 1, 2]))).sum().backward()
    replicas.collect_gradients()
    collected = module.head.weight.grad
    module.zero_grad()
    module.head(module.embedding(torch.tensor([1, 1, 2]))).sum().backward()
    assert torch.equal(collected, module.head.weight.grad)


def test_recurrent_modules_need_not_flatten_their_weights_again() -> None:
    module, x = nn.LSTM(3, 4, num_layers=2, batch_first=True), torch.randn(2, 5, 3)
    replicas = copies(module)
    replica = replicas[1]
    own = [id(parameter) for parameter in replica.parameters()]
    assert [id(weight) for weight in replica._flat_weights] == own
    assert [id(reference()) for reference in replica._flat_weight_refs] == own
    replica(x)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in replica.parameters())
    assert all(parameter.grad is None for parameter in module.parameters())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    replicas.refresh([0, 1])
    assert [id(weight) for weight in replica._flat_weights] == own
    assert torch.equal(replica(x)[0], module(x)[0])


def test_weights_of_recurrent_copies_are_flattened_once() -> None:
    flattened: list[tuple[nn.Module, list[int]]] = []

    class Recorded(nn.LSTM):
        def flatten_parameters(self) -> None:
            flattened.append((self, [id(weight) for weight in self._flat_weights]))
            super().flatten_parameters()

    module = nn.Sequential(Recorded(2, 2))
    flattened.clear()
    replicas = copies(module, 1)
    with torch.no_grad():
        module[0].weight_hh_l0.add_(1)
    replicas.refresh([0, 1])
    assert flattened == [(replicas[1][0], [id(parameter) for parameter in replicas[1].parameters()])]


def test_a_copy_computes_what_the_module_computes() -> None:
    module, x = Whole().double(), torch.randn(4, 3, dtype=torch.float64)
    replica = copies(module)[2]
    assert torch.equal(replica(x), module(x))
    assert torch.equal(replica.step(x), module.step(x))


# Attributes


def test_attributes_that_refer_to_parts_refer_to_those_of_the_copy() -> None:
    module = Whole()
    replica = copies(module)[1]
    assert replica.layers[0] is replica.first
    assert replica.layers[1] is replica.second
    assert replica.by_name["first"] is replica.first
    assert replica.by_name["other"] == 3
    assert replica.ordered["second"] is replica.second
    assert type(replica.ordered) is OrderedDict
    assert replica.counts["of"][0] is replica.norm
    assert replica.counts["missing"] == []
    assert replica.pair[0] is replica.first.weight
    assert replica.pair[1][0] is replica.norm.running_mean
    assert replica.step.__self__ is replica
    assert replica.itself() is replica
    for name in ("plain", "function", "nothing", "number"):
        assert getattr(replica, name) is getattr(module, name)
    assert module.layers[0] is module.first  # the module's own are untouched
    assert module.step.__self__ is module


def test_attributes_are_those_the_module_has_now() -> None:
    module = Whole()
    replicas = copies(module)
    replica = replicas[1]
    module.number, module.nothing, module.later = 2.5, "something", [1]
    del module.function
    module.eval()
    replicas.refresh([0, 1])
    assert (replica.number, replica.nothing, replica.later) == (2.5, "something", [1])
    assert not hasattr(replica, "function")
    assert not replica.training
    assert not replica.norm.training
    module.train()
    replicas.refresh([0, 1])
    assert replica.norm.training


def test_what_a_copy_set_itself_is_forgotten() -> None:
    module = Whole()
    replicas = copies(module)
    replica = replicas[1]
    replica.number, replica.cache, replica.layers = 3.5, torch.zeros(2), []
    replica.first.seen = True
    replicas.refresh([0, 1])
    assert replica.number == 1.5
    assert not hasattr(replica, "cache")
    assert not hasattr(replica.first, "seen")
    assert replica.layers[0] is replica.first
    assert (module.number, hasattr(module, "cache")) == (1.5, False)


def test_references_that_change() -> None:
    module = Whole()
    replicas = copies(module)
    replica = replicas[1]
    module.layers = [module.second]  # another
    module.by_name["more"] = module.norm  # changed in place
    module.counts["of"].append(module.first)
    module.nothing = module.forward  # none before
    module.fresh = (module.second,)  # new
    module.step = torch.relu  # none any more
    del module.pair
    replicas.refresh([0, 1])
    assert replica.layers[0] is replica.second
    assert replica.by_name["more"] is replica.norm
    assert replica.counts["of"][1] is replica.first
    assert replica.nothing.__self__ is replica
    assert replica.fresh[0] is replica.second
    assert replica.step is torch.relu
    assert not hasattr(replica, "pair")
    assert replica is replicas[1]


def test_hooks_run_on_the_copy() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.layer.register_forward_hook(self.scaled)

        def scaled(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return output * self.scale

        def shifted(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return output + self.scale

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    module, x = Hooked(), torch.randn(3, 2)
    replicas = copies(module)
    replica = replicas[1]
    replica(x).sum().backward()
    assert replica.scale.grad is not None
    assert module.scale.grad is None
    handle = module.layer.register_forward_hook(module.shifted)
    replicas.refresh([0, 1])
    assert torch.equal(replica(x), module(x))
    handle.remove()
    replicas.refresh([0, 1])
    assert torch.equal(replica(x), module(x))
    assert torch.equal(replica(x), nn.functional.linear(x, module.layer.weight, module.layer.bias) * 2)


# Values before a step


def test_parameters_follow_the_module() -> None:
    module = Whole()
    replicas = copies(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        module(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        replicas.refresh([0, 1, 2])
        assert weights(replicas[1]) == weights(module) == weights(replicas[2])
    module.load_state_dict(Whole().state_dict())
    replicas.refresh([0, 2])  # one of them later
    replicas.refresh([0, 1, 2])
    assert weights(replicas[1]) == weights(module) == weights(replicas[2])


def test_parameters_are_copied_only_where_they_changed() -> None:
    module = Whole()
    replicas = copies(module, 1)
    before = [parameter._version for parameter in replicas[1].parameters()]
    for _ in range(3):
        module(torch.randn(4, 3))
        replicas.refresh([0, 1])
    assert [parameter._version for parameter in replicas[1].parameters()] == before
    with torch.no_grad():
        module.second.bias.add_(1)
    replicas.refresh([0, 1])
    assert all(parameter._version > 0 for parameter in replicas[1].parameters())
    assert weights(replicas[1]) == weights(module)


def test_changes_without_a_trace_are_seen_after_distrust() -> None:
    module = nn.Linear(2, 2)
    replicas = copies(module)
    module.weight.data = torch.ones(2, 2)
    module.bias.data.fill_(3)
    replicas.distrust()
    replicas.refresh([0, 1])
    assert weights(replicas[1]) == weights(module)
    module.weight.data.fill_(5)
    replicas.refresh([0, 1, 2])
    assert weights(replicas[1]) != weights(module)  # the documented limit
    assert weights(replicas[2]) == weights(module)  # was not asked for since
    replicas.distrust()
    replicas.refresh([0, 1])
    assert weights(replicas[1]) == weights(module)


def test_requires_grad_follows_the_module() -> None:
    module = Whole()
    replicas = copies(module)
    module.first.requires_grad_(False)
    replicas.refresh([0, 1])
    replica = replicas[1]
    assert [parameter.requires_grad for parameter in replica.first.parameters()] == [False, False]
    replica(torch.randn(3, 3)).sum().backward()
    assert replica.first.weight.grad is None
    module.first.requires_grad_(True)
    module.second.weight.requires_grad = False
    replicas.refresh([0, 1])
    wanted = [parameter.requires_grad for parameter in module.parameters()]
    assert [parameter.requires_grad for parameter in replica.parameters()] == wanted


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_copies_made_without_gradients_train_later(mode: Callable[[], Any]) -> None:
    module = Whole()
    with mode():
        replicas = copies(module)
    replicas.refresh([0, 1])
    replicas[1](torch.randn(3, 3)).sum().backward()
    replicas.collect_gradients()
    assert module.first.weight.grad is not None
    with torch.no_grad():
        module.first.weight.add_(1)
    with mode():
        replicas.refresh([0, 1])
    assert weights(replicas[1]) == weights(module)


def test_a_module_made_in_inference_mode() -> None:
    with torch.inference_mode():
        module = nn.BatchNorm1d(2)
        module.weight.requires_grad_(False)
        replicas = copies(module)
        module.weight.fill_(3)
        module.running_mean.fill_(4)
        replicas.refresh([0, 1])
        assert replicas[1].weight.tolist() == [3, 3]
        assert replicas[1].running_mean.tolist() == [4, 4]


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "second", nn.Linear(3, 4)),
        lambda module: setattr(module.second, "weight", nn.Parameter(torch.ones(2, 3))),
        lambda module: setattr(module.second, "bias", None),
        lambda module: module.add_module("third", nn.Linear(1, 1)),
        lambda module: module.register_parameter("scale", nn.Parameter(torch.ones(2))),
        lambda module: delattr(module, "second"),
        lambda module: module.register_buffer("later", torch.ones(2)),
        lambda module: setattr(module.norm, "running_mean", None),
        lambda module: delattr(module.norm, "running_var"),
    ],
)
def test_copies_are_made_anew_where_parts_come_or_go(change: Callable[[nn.Module], Any]) -> None:
    module = Whole()
    replicas = copies(module)
    before = replicas[1]
    change(module)
    replicas.refresh([0, 1])
    assert replicas[1] is not before
    state = module.state_dict()
    assert list(replicas[1].state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in replicas[1].state_dict().items())
    before = replicas[1]
    replicas.refresh([0, 1])
    assert replicas[1] is before


def test_gradients_after_a_change_of_structure() -> None:
    """A copy that is not needed at once must not get mixed up with those made anew."""
    module = nn.Sequential(nn.Linear(2, 2))
    replicas = copies(module, 2)
    module.append(nn.Linear(2, 1))
    replicas.refresh([0, 1])
    replicas[1](torch.ones(1, 2)).sum().backward()
    replicas.collect_gradients()
    assert module[1].bias.grad is not None
    assert module[1].bias.grad.tolist() == [1]
    replicas.refresh([0, 1, 2])
    assert weights(replicas[2]) == weights(module)


# Buffers


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = x.detach()  # another tensor, perhaps of another shape
        return x * self.calls


def test_buffers_of_the_first_survive() -> None:
    module = nn.BatchNorm1d(2)
    replicas, expected = copies(module), copy.deepcopy(module)
    for _ in range(3):
        parts = [torch.randn(4, 2) for _ in range(3)]
        replicas.refresh([0, 1, 2])
        for index, part in enumerate(parts):
            replicas[index](part)
        expected(parts[0])
    assert torch.equal(module.running_mean, expected.running_mean)
    assert torch.equal(module.running_var, expected.running_var)
    assert module.num_batches_tracked == 3
    replicas.refresh([0, 1, 2])
    assert torch.equal(replicas[2].running_mean, expected.running_mean)


def test_buffers_are_copied_only_where_they_changed() -> None:
    module = nn.BatchNorm1d(2)
    replicas = copies(module, 1)
    own = replicas[1].running_mean
    pointer = own.data_ptr()
    own.data.fill_(7)  # leaves no trace
    replicas.refresh([0, 1])
    assert own.tolist() == [7, 7]
    module(torch.randn(3, 2))
    replicas.refresh([0, 1])
    assert torch.equal(replicas[1].running_mean, module.running_mean)
    replicas[1](torch.randn(3, 2))
    replicas.refresh([0, 1])
    assert torch.equal(replicas[1].running_mean, module.running_mean)
    assert replicas[1].running_mean.data_ptr() == pointer


def test_a_buffer_of_another_shape_follows() -> None:
    module = Counting()
    replicas = copies(module, 1)
    module(torch.ones(3, dtype=torch.float64))
    replicas.refresh([0, 1])
    assert replicas[1].seen.tolist() == [1, 1, 1]
    assert replicas[1].seen.dtype is torch.float64
    assert replicas[1].calls == 1
    replicas[1](torch.ones(5))
    replicas.refresh([0, 1])
    assert replicas[1].seen.shape == (3,)
    assert module.seen.shape == (3,)


def test_a_buffer_that_a_copy_let_go_comes_back() -> None:
    module = Counting()
    replicas = copies(module, 1)
    replicas[1].seen = None
    del replicas[1].calls
    replicas.refresh([0, 1])
    assert replicas[1].seen.tolist() == [0, 0]
    assert replicas[1].calls == 0


def test_buffers_are_copied_without_a_trace_in_graphs() -> None:
    """A graph that uses a copy's buffer outlives the next refresh, as when two forwards precede one backward."""
    module = nn.BatchNorm1d(2)
    module.eval()
    replicas, x = copies(module, 1), torch.ones(1, 2, requires_grad=True)
    out = replicas[1](x)
    module.running_mean.add_(1)
    replicas.refresh([0, 1])
    out.sum().backward()
    assert x.grad is not None


def test_a_copy_that_computed_in_the_modules_place_gives_back() -> None:
    module = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "count": Counting()})
    module.step = 1
    replicas = copies(module, 2)
    replica = replicas[1]
    replica["norm"](torch.randn(4, 2))
    replica["count"](torch.ones(3))
    replica.step, replica["count"].last = 2, "a"
    replicas.give_back(1)
    assert torch.equal(module["norm"].running_mean, replica["norm"].running_mean)
    assert module["norm"].running_mean is not replica["norm"].running_mean
    assert module["norm"].num_batches_tracked == 1
    assert module["count"].seen.tolist() == [1, 1, 1]
    assert (module.step, module["count"].last, module["count"].calls) == (2, "a", 1)
    replicas.refresh([0, 2])
    assert torch.equal(replicas[2]["norm"].running_var, module["norm"].running_var)
    assert replicas[2]["count"].seen.tolist() == [1, 1, 1]
    assert replicas[2].step == 2


def test_what_is_given_back_refers_to_the_module() -> None:
    module = Whole()
    replicas = copies(module)
    replicas[1](torch.randn(4, 3))
    replicas.give_back(1)
    assert module.layers[0] is module.first
    assert module.step.__self__ is module
    assert module.norm.num_batches_tracked == 1
    assert dict(module.named_parameters())["first.weight"] is module.first.weight
    replicas.give_back(0)  # the module itself has nothing to give
    replicas[1].norm.running_mean = None
    replicas.give_back(1)
    assert module.norm.running_mean is not None


# Gradients


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.integers(0, 3), min_size=2, max_size=5), windows=st.integers(1, 3), seed=st.integers(0, 99))
def test_gradients_are_those_of_the_whole_batch(sizes: list[int], windows: int, seed: int) -> None:
    torch.manual_seed(seed)
    module = net()
    expected = copy.deepcopy(module)
    replicas = Replicas(module, [CPU] * len(sizes))
    for _ in range(windows):
        indices = [index for index, size in enumerate(sizes) if size]
        replicas.refresh(indices)
        parts = [torch.randn(sizes[index], 3, dtype=torch.float64) for index in indices]
        for index, part in zip(indices, parts, strict=True):
            replicas[index](part).pow(2).sum().backward()
        replicas.collect_gradients()
        for part in parts:
            expected(part).pow(2).sum().backward()
    for parameter, other in zip(module.parameters(), expected.parameters(), strict=True):
        if other.grad is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-12)
    assert all(p.grad is None for index in range(1, len(sizes)) if sizes[index] for p in replicas[index].parameters())


HAVE = [(first, second, third) for first in (0, 1) for second in (0, 1) for third in (0, 1)]


def test_gradients_that_some_lack() -> None:
    """A parameter for every combination of who has a gradient."""
    module = nn.ParameterList([torch.zeros(2) for _ in HAVE] + [torch.zeros(3) for _ in HAVE])
    replicas = copies(module)
    for index in range(3):
        own = list(replicas[index].parameters())
        for position, have in enumerate(HAVE * 2):
            if have[index]:
                own[position].grad = torch.full_like(own[position], 10.0**index)
    replicas.collect_gradients()
    for parameter, have in zip(module.parameters(), HAVE * 2, strict=True):
        if not any(have):
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            assert parameter.grad.tolist() == [sum(10**index * own for index, own in enumerate(have))] * len(parameter)
    assert all(parameter.grad is None for index in (1, 2) for parameter in replicas[index].parameters())
    before = [parameter.grad for parameter in module.parameters()]
    replicas.collect_gradients()  # again changes nothing
    assert all(parameter.grad is grad for parameter, grad in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("who", [(0, 1, 2), (1, 2), (2,), (0, 2)])
def test_sparse_gradients(who: tuple[int, ...]) -> None:
    module = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1)).double()
    replicas, expected = copies(module), copy.deepcopy(module)
    for index in who:
        words = torch.tensor([index, 3, 3])
        replicas[index](words).pow(2).sum().backward()
        expected(words).pow(2).sum().backward()
    replicas.collect_gradients()
    assert module[0].weight.grad.is_sparse
    for parameter, other in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.to_dense(), other.grad.to_dense(), rtol=1e-12, atol=1e-12)
    assert replicas[2][0].weight.grad is None


def test_without_copies_there_is_nothing_to_collect() -> None:
    module = net()
    replicas = Replicas(module, [CPU, CPU])
    replicas.refresh([0])
    module(torch.zeros(1, 3, dtype=torch.float64)).sum().backward()
    grads = [parameter.grad for parameter in module.parameters()]
    replicas.collect_gradients()
    replicas.distrust()
    assert all(parameter.grad is grad for parameter, grad in zip(module.parameters(), grads, strict=True))


# Metrics


class Measured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.accuracy = MulticlassAccuracy(3)
        self.scores = MetricCollection({"f1": MulticlassF1Score(3), "accuracy": MulticlassAccuracy(3)})
        self.mean = MeanMetric()
        self.all_metrics = [self.accuracy, self.mean]

    def step(self, x: Tensor, y: Tensor) -> None:
        logits = self.layer(x)
        self.accuracy(logits, y)
        self.scores.update(logits, y)
        self.all_metrics[1].update(x)

    def values(self) -> dict[str, float]:
        return {
            "accuracy": float(self.accuracy.compute()),
            **{name: float(value) for name, value in self.scores.compute().items()},
            "mean": float(self.mean.compute()),
        }


def test_metrics_of_copies_are_their_own_and_empty() -> None:
    module = Measured()
    module.step(torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))
    replicas = copies(module)
    replica = replicas[1]
    assert replica.accuracy is not module.accuracy
    assert replica.all_metrics[0] is replica.accuracy
    assert [metric.update_count for metric in (replica.accuracy, replica.mean)] == [0, 0]
    assert replicas.original(replica.accuracy) is module.accuracy
    assert replicas.original(replica.scores["f1"]) is module.scores["f1"]
    assert replicas.original(module.mean) is module.mean
    stranger = MeanMetric()
    assert replicas.original(stranger) is stranger


@pytest.mark.parametrize("alone_first", [True, False])
def test_a_metric_that_is_also_in_a_collection_is_copied_once(alone_first: bool) -> None:
    module, collection = nn.Module(), MetricCollection({"mean": MeanMetric(), "accuracy": MulticlassAccuracy(3)})
    parts = {"alone": collection["mean"], "all": collection}
    for name in parts if alone_first else reversed(parts):
        setattr(module, name, parts[name])
    replicas = copies(module)
    replica = replicas[1]
    assert replica.alone is replica.all["mean"]
    assert replica.alone is not module.alone
    with replicas.metrics_in_parts([0, 1], [1, 2]):
        module.alone.update(torch.tensor([1.0]))
        replica.alone.update(torch.tensor([2.0, 3.0]))
    assert module.alone.compute() == 2


@pytest.mark.parametrize("indices", [(0, 1, 2), (1, 2), (2,), (0,)])
def test_metrics_end_with_the_whole_data(indices: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    module = Measured()
    replicas, expected = copies(module), copy.deepcopy(module)
    for size in (5, 4, 3):
        x, y = torch.randn(size, 2), torch.randint(3, (size,))
        sizes = [1] * (len(indices) - 1) + [size - len(indices) + 1]
        replicas.refresh(indices)
        with replicas.metrics_in_parts(indices, sizes):
            for index, *part in zip(indices, x.split(sizes), y.split(sizes), strict=True):
                replicas[index].step(*part)
        expected.step(x, y)
        assert module.values() == pytest.approx(expected.values(), rel=1e-5, abs=1e-6)
    assert module.accuracy.update_count == 3
    assert [metric.update_count for metric in (replicas[1].accuracy, replicas[1].mean)] == [0, 0]


def test_metrics_are_as_before_when_a_step_failed() -> None:
    module = Measured()
    module.step(torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))
    before, replicas = module.values(), copies(module)
    with pytest.raises(ValueError, match="too bad"), replicas.metrics_in_parts([0, 1], [2, 2]):  # noqa: PT012
        for index in (0, 1):
            replicas[index].step(torch.zeros(2, 2), torch.tensor([0, 1]))
        raise ValueError("too bad")
    assert module.values() == before
    assert module.accuracy.update_count == 1
    assert replicas[1].accuracy.update_count == 0


def test_metrics_are_as_before_when_one_cannot_be_put_together() -> None:
    class Odd(MeanMetric):
        pass

    module = Measured()
    module.odd = Odd()
    module.odd._reductions["mean_value"] = None
    module.step(torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))
    before, replicas = module.values(), copies(module)
    with pytest.raises(StepError, match="The metric Odd cannot"), replicas.metrics_in_parts([0, 1], [2, 2]):  # noqa: PT012
        for index in (0, 1):
            replicas[index].step(torch.zeros(2, 2), torch.tensor([0, 1]))
            replicas[index].odd.update(torch.ones(2))
    assert module.values() == before


# What cannot be copied


class Holds(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        vars(self.layer).update(attributes)


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(1, 1), nn.Linear(1, 1, device="meta")


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: nn.Sequential(torch.jit.script(nn.Linear(1, 1))),
            ["Sequential.0 is a TorchScript module, which cannot be copied"],
        ),
        (
            lambda: nn.Sequential(nn.ReLU(), torch.compile(nn.Linear(1, 1))),
            ["Sequential.1 is compiled, for one device", "Leave `torch.compile` out"],
        ),
        (lambda: nn.Sequential(nn.LazyLinear(2)), ["Sequential.0 is lazy", "Run a batch through it"]),
        (
            lambda: Holds(table=torch.zeros(3)),
            ["Holds.layer.table is a tensor that stays on its device", "`self.register_buffer('table', ...)`"],
        ),
        (Spread, ["The parameters of Spread lie on several devices: ", "here.weight on cpu, there.weight on meta"]),
    ],
)
def test_what_cannot_be_copied_is_refused(make: Callable[[], nn.Module], expected: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_replicable(make(), [CPU, META])
    for part in expected:
        assert part in str(caught.value)


def test_a_module_compiled_in_place_is_refused() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].compile()
    with pytest.raises(ConfigurationError, match=r"Sequential\.0 is compiled"):
        check_replicable(module, [CPU, CPU])


@pytest.mark.parametrize(
    ("module", "devices"),
    [
        (Whole(), [CPU, META]),
        (Measured(), [CPU, META]),  # metrics hold tensors of their own
        (Holds(number=torch.tensor(1.0)), [CPU, META]),  # numbers go along with any device
        (Holds(table=torch.zeros(3)), [CPU, CPU]),
        (nn.LSTM(1, 1), [CPU, META]),
        (nn.Identity(), [CPU, META]),
    ],
)
def test_what_can_be_copied_is_not(module: nn.Module, devices: list[torch.device]) -> None:
    check_replicable(module, devices)
    Replicas(module, devices).refresh([0, 1])


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(method: str) -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    handle = getattr(module[0].bias, method)(lambda *args: None)
    replicas = Replicas(module, [CPU, CPU])
    with pytest.raises(ConfigurationError, match=r"The parameter '0\.bias' has a hook, .* `on_after_backward`"):
        replicas.refresh([0, 1])
    replicas.refresh([0])  # nothing is copied
    handle.remove()
    replicas.refresh([0, 1])


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
        lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
        lambda: prune.random_unstructured(nn.Linear(2, 2), "weight", 0.5),
    ],
)
def test_what_a_hook_makes_anew_may_be_an_attribute(make: Callable[[], nn.Module]) -> None:
    module = nn.Sequential(make())
    check_replicable(module, [CPU, torch.device("meta")])
    replicas = copies(module, 1)
    module[0](torch.zeros(1, 2)).sum().backward()
    replicas.refresh([0, 1])
    module.eval()  # of spectral norm: no iteration of its power method
    replicas[1].eval()
    x = torch.randn(3, 2)
    assert torch.equal(replicas[1](x), module(x))


def test_a_buffer_that_is_not_there_makes_no_copy_outdated() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False))
    replicas = copies(module, 1)
    made = replicas[1]
    replicas.refresh([0, 1])
    assert replicas[1] is made
    module[0].register_buffer("offset", torch.ones(2))
    replicas.refresh([0, 1])
    assert replicas[1] is not made
