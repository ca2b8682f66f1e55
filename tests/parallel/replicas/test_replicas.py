"""Copies have the structure and values of the module, share what is no part of it, and give back what they learnt."""

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from equipoise.parallel.replicas.replicable import check_replicable
from equipoise.parallel.replicas.replicas import Replicas
from tests.support.equality import assert_equal
from tests.support.trainer_runs import refuses

CPU, META = torch.device("cpu"), torch.device("meta")


def copies(module: nn.Module, count: int = 2) -> Replicas:
    """A module and its copies, ready for a step."""
    made = Replicas(module, [CPU] * (count + 1))
    made.refresh(range(count + 1))
    return made


def weights(module: nn.Module) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in module.parameters()]


class Whole(nn.Module):
    """Has attributes of all kinds that refer to it and to its parts, and computes with all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.layers = [self.first, self.second]
        self.by_name = {"first": self.first, "other": 3}
        self.ordered = OrderedDict(second=self.second)
        self.counts = defaultdict(list, of=[self.norm])
        self.pair = (self.first.weight, [self.norm.running_mean])
        self.step = self.shifted
        self.itself = weakref.ref(self)
        self.function = torch.relu
        self.number = 1.5

    def shifted(self, x: Tensor) -> Tensor:
        return x + self.second.bias.sum()

    def scaled(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * self.first.bias.sum()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.function(self.layers[0](x))
        for part in [*self.counts["of"], *self.layers[1:], *self.ordered.values(), *getattr(self, "more", ())]:
            hidden = part(hidden)
        assert self.counts["missing"] == []
        tensors = [self.pair[0], *self.pair[1], self.itself().first.bias, self.by_name["first"].weight]
        return self.step(hidden) * self.number + self.by_name["other"] + sum(tensor.sum() for tensor in tensors)


class Tied(nn.Module):
    """A weight and a buffer that two parts share, and a part with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head.weight = self.inner.weight
        self.again = self.head
        self.register_buffer("mask", torch.ones(3))
        self.head.register_buffer("mask", self.mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.inner(x) * self.mask) + self.head.mask


class Absent(nn.Linear):
    """Names that are registered and stand for nothing."""

    def __init__(self) -> None:
        super().__init__(3, 2, bias=False)
        self.register_module("absent", None)
        self.register_buffer("empty", None)


def results(module: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Results of a module, and the gradients of its parameters."""
    torch.manual_seed(4)
    output = module(x)
    output = output[0] if isinstance(output, tuple) else output
    if output.requires_grad:
        output.square().sum().backward()
    return [output.detach(), *(parameter.grad for parameter in module.parameters())]


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def description(module: nn.Module) -> list[Any]:
    """Return the parts of a module, without the values of its tensors."""
    parts = [(name, type(part), part.training) for name, part in module.named_modules()]
    kinds = {name: type(tensor) for name, tensor in tensors(module).items()}
    return [type(module), repr(module), vars(module).keys(), list(module.state_dict()), parts, kinds]


def assert_alike(module: nn.Module, replica: nn.Module, x: Tensor) -> None:
    """See that a copy has what the module has, computes the same, and learns by parameters of its own."""
    assert description(replica) == description(module)
    assert_equal(tensors(module), tensors(replica))
    places, others = ({tensor.data_ptr() for tensor in tensors(each).values()} for each in (module, replica))
    assert not (places & others) - {0}
    actual = results(replica, x)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert_equal(results(module, x), actual)


# Structure


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Whole, (4, 3)),
        (Tied, (4, 3)),
        (Absent, (4, 3)),
        (lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True), (5, 2, 3)),
        (lambda: parametrize.register_parametrization(nn.Linear(3, 3), "weight", nn.Tanh()), (4, 3)),
        (nn.ReLU, (3,)),
    ],
    ids=["whole", "tied", "absent", "LSTM", "parametrised", "stateless"],
)
def test_a_copy_computes_as_the_module(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    module = make()
    replicas = copies(module)
    assert replicas[0] is module
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.add_(1)
    replicas.refresh([0, 1, 2])
    assert_alike(module, replicas[1], torch.randn(shape))


def test_a_copy_lies_on_its_device() -> None:
    replicas = Replicas(nn.BatchNorm1d(3), [CPU, META])
    replicas.module.device = CPU
    replicas.refresh([0, 1])
    replica = replicas[1]
    assert {tensor.device for tensor in [*replica.parameters(), *replica.buffers()]} == {META}
    assert replica.device == META
    assert replica(torch.zeros(2, 3, device=META)).device == META


# Changes between two steps


def change_attributes(module: Whole, replica: Whole) -> None:
    module.number, module.function, module.later = 2.5, torch.tanh, [1]
    del module.itself
    module.itself = weakref.ref(module)


def set_in_the_copy(module: Whole, replica: Whole) -> None:
    """Attributes that a copy set itself are forgotten."""
    replica.number, replica.cache, replica.layers, replica.first.seen = 3.5, torch.zeros(2), [], True


def change_references(module: Whole, replica: Whole) -> None:
    """Others, others in the same containers, and such as were none before or are none any more."""
    module.layers = [nn.Identity(), module.second]
    module.by_name["first"] = module.second
    module.counts["of"].append(module.first)
    module.ordered["third"] = module.norm
    module.more = (module.second,)
    module.step, module.function = torch.tanh, module.shifted
    module.pair = (module.norm.weight, [])


def add_hooks(module: Whole, replica: Whole) -> None:
    module.first.register_forward_hook(module.scaled)
    module.norm.register_forward_hook(module.scaled).remove()


def step(module: Whole, replica: Whole) -> None:
    module(torch.randn(4, 3)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    module.zero_grad()


def freeze(module: Whole, replica: Whole) -> None:
    module.first.requires_grad_(False)
    module.second.weight.requires_grad = False


def compute_in_the_copy(module: Whole, replica: Whole) -> None:
    replica(torch.randn(4, 3))


def let_buffers_go(module: Whole, replica: Whole) -> None:
    replica.norm.running_var = None
    del replica.norm.num_batches_tracked


CHANGES: list[Callable[[Any, Any], Any]] = [
    change_attributes,
    set_in_the_copy,
    change_references,
    add_hooks,
    step,
    freeze,
    compute_in_the_copy,
    let_buffers_go,
    lambda module, replica: module.norm.eval(),
    lambda module, replica: module.load_state_dict(Whole().state_dict()),
]


@pytest.mark.parametrize("change", CHANGES)
def test_copies_follow_the_module(change: Callable[[Any, Any], Any]) -> None:
    module = Whole()
    replicas = copies(module)
    made = replicas[1]
    change(module, made)
    replicas.refresh([0, 2])  # one of them later
    replicas.refresh([0, 1, 2])
    assert replicas[1] is made
    assert not hasattr(made.first, "seen")
    assert_alike(module, made, torch.randn(4, 3))


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.layers.append(setattr(module, "third", nn.Linear(3, 3)) or module.third),
        lambda module: setattr(module.second, "weight", nn.Parameter(torch.ones(3, 3))),
        lambda module: module.register_parameter("scale", nn.Parameter(torch.ones(2))),
        lambda module: delattr(module, "third"),
        lambda module: module.register_buffer("later", torch.ones(2)),
        lambda module: setattr(module.spare, "running_mean", None),
        lambda module: module.bare.register_buffer("offset", torch.ones(2)),
    ],
    ids=["module", "replaced", "parameter", "module gone", "buffer", "buffer None", "first buffer"],
)
def test_copies_are_made_anew_where_parts_come_or_go(change: Callable[[nn.Module], Any]) -> None:
    module = Whole()
    module.third, module.spare = nn.Linear(1, 1), nn.BatchNorm1d(3)
    module.bare = nn.BatchNorm1d(3, track_running_stats=False)
    replicas = copies(module)
    before = replicas[1]
    replicas.refresh([0, 1])
    assert replicas[1] is before
    change(module)
    replicas.refresh([0, 1])
    assert replicas[1] is not before
    assert_alike(module, replicas[1], torch.randn(4, 3))


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


def test_changes_without_a_trace_are_seen_after_distrust() -> None:
    module = nn.BatchNorm1d(2)
    replicas = copies(module)
    module.weight.data = torch.full((2,), 3.0)
    module.bias.data.fill_(3)
    replicas.distrust()
    replicas.refresh([0, 1])
    assert weights(replicas[1]) == weights(module)
    module.weight.data.fill_(5)
    module.running_mean.data.fill_(5)
    replicas.refresh([0, 1, 2])
    # The documented limit: what has not changed is not copied.
    assert weights(replicas[1]) != weights(module)
    assert replicas[1].running_mean.tolist() == [0, 0]
    assert weights(replicas[2]) == weights(module)  # was not asked for since
    replicas.distrust()
    replicas.refresh([0, 1])
    assert weights(replicas[1]) == weights(module)
    assert replicas[1].running_mean.tolist() == [5, 5]


def test_copies_made_without_gradients_train_later() -> None:
    module = Whole()
    with torch.inference_mode():
        replicas = copies(module)
    replicas.refresh([0, 1])
    replicas[1](torch.randn(3, 3)).sum().backward()
    replicas.collect_gradients()
    assert module.first.weight.grad is not None
    with torch.no_grad():
        module.first.weight.add_(1)
    with torch.inference_mode():
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


def test_a_buffer_of_another_shape_or_device_follows_the_module() -> None:
    module = Counting()
    replicas = copies(module, 1)
    replicas[1].seen = torch.empty(5, device=META)
    replicas.refresh([0, 1])
    assert (replicas[1].seen.device, replicas[1].seen.tolist()) == (CPU, [0, 0])
    module(torch.ones(3, dtype=torch.float64))
    replicas.refresh([0, 1])
    assert_alike(module, replicas[1], torch.ones(5))
    replicas.refresh([0, 1])
    assert replicas[1].seen.shape == (5,)


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
    module.parts = [module["norm"]]
    replicas = copies(module, 2)
    replica = replicas[1]
    replica["norm"](torch.randn(4, 2))
    replica["count"](torch.ones(3))
    replica.step, replica["count"].last = 2, "a"
    replicas.give_back(0)  # the module itself has nothing to give
    replicas.give_back(1)
    assert_equal(replica.state_dict(), module.state_dict())
    assert (module.step, module["count"].last, int(module["norm"].num_batches_tracked)) == (2, "a", 1)
    assert module["norm"].running_mean is not replica["norm"].running_mean
    assert module.parts == [module["norm"]]
    replicas.refresh([0, 2])
    assert_equal(module.state_dict(), replicas[2].state_dict())
    assert replicas[2].step == 2
    replica["norm"].running_mean = None
    replicas.give_back(1)
    assert module["norm"].running_mean is not None


# Gradients


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.to_dense() for parameter in module.parameters()]


def test_gradients_that_some_copies_lack_are_summed() -> None:
    """A parameter for every combination of who has a gradient, which the digits of its number tell."""
    module = nn.ParameterList(torch.zeros(()) for _ in range(8))
    replicas = copies(module)
    for number in range(8):
        for index in range(3):
            if number >> index & 1:
                replicas[index][number].grad = torch.tensor(2.0**index)
    replicas.collect_gradients()
    assert module[0].grad is None
    assert [parameter.grad.item() for parameter in module[1:]] == list(range(1, 8))
    assert all(parameter.grad is None for index in (1, 2) for parameter in replicas[index].parameters())
    replicas.collect_gradients()  # again changes nothing
    assert [parameter.grad.item() for parameter in module[1:]] == list(range(1, 8))


def test_sparse_gradients_are_summed() -> None:
    module = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1)).double()
    replicas, expected = copies(module), copy.deepcopy(module)
    for index in range(3):
        words = torch.tensor([index, 3, 3])
        replicas[index](words).pow(2).sum().backward()
        expected(words).pow(2).sum().backward()
    replicas.collect_gradients()
    assert module[0].weight.grad.is_sparse
    assert_equal(gradients(expected), gradients(module), 1e-12)
    assert replicas[2][0].weight.grad is None


# Metrics


class Measured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)
        self.scores = MetricCollection({"f1": MulticlassF1Score(3), "accuracy": MulticlassAccuracy(3)})

    def step(self, logits: Tensor, labels: Tensor) -> None:
        self.accuracy(logits, labels)
        self.scores.update(logits, labels)

    def values(self) -> dict[str, Tensor]:
        return {"alone": self.accuracy.compute(), **self.scores.compute()}


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
    assert replicas.original(replica.alone) is replicas.original(module.alone) is module.alone
    with replicas.metrics_in_parts([0, 1], [1, 2]):
        module.alone.update(torch.tensor([1.0]))
        replica.alone.update(torch.tensor([2.0, 3.0]))
    assert module.alone.compute() == 2


def test_metrics_are_as_before_when_a_step_failed() -> None:
    module = Measured()
    module.step(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    before, replicas = module.values(), copies(module)
    with pytest.raises(ValueError, match="too bad"), replicas.metrics_in_parts([0, 1], [2, 2]):  # noqa: PT012
        for index in (0, 1):
            replicas[index].step(torch.zeros(2, 3), torch.tensor([0, 1]))
        raise ValueError("too bad")
    assert_equal(before, module.values())
    assert module.accuracy.update_count == 1
    assert replicas[1].accuracy.update_count == 0


# What cannot be copied


class Holds(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        vars(self.layer).update(attributes)


def compiled_in_place() -> nn.Module:
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].compile(backend="eager")
    return module


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: nn.Sequential(torch.jit.script(nn.Linear(1, 1))),
            ["Sequential.0 is a TorchScript module, which cannot be copied"],
        ),
        (
            lambda: nn.Sequential(nn.ReLU(), torch.compile(nn.Linear(1, 1), backend="eager")),
            ["Sequential.1 is compiled, for one device", "Leave `torch.compile` out"],
        ),
        (compiled_in_place, ["Sequential.0 is compiled"]),
        (lambda: nn.Sequential(nn.LazyLinear(2)), ["Sequential.0 is lazy", "Run a batch through it"]),
        (
            lambda: Holds(table=torch.zeros(3)),
            ["Holds.layer.table is a tensor that stays on its device", "`self.register_buffer('table', ...)`"],
        ),
    ],
)
def test_what_cannot_be_copied_is_refused(make: Callable[[], nn.Module], expected: list[str]) -> None:
    refuses(lambda: check_replicable(make(), [CPU, META]), *expected)


@pytest.mark.parametrize(
    ("module", "devices"),
    [
        (Measured(), [CPU, META]),  # metrics hold tensors of their own
        (Holds(number=torch.tensor(1.0)), [CPU, META]),  # numbers go along with any device
        (Holds(table=torch.zeros(3)), [CPU, CPU]),
        (nn.LSTM(1, 1), [CPU, META]),
    ],
)
def test_what_can_be_copied_is_not_refused(module: nn.Module, devices: list[torch.device]) -> None:
    check_replicable(module, devices)
    Replicas(module, devices).refresh([0, 1])


def test_hooks_on_parameters_are_refused() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    handle = module[0].bias.register_hook(lambda gradient: None)
    replicas = Replicas(module, [CPU, CPU])
    refuses(lambda: replicas.refresh([0, 1]), "The parameter '0.bias' has a hook, ", "`on_after_backward`")
    replicas.refresh([0])  # nothing is copied
    handle.remove()
    replicas.refresh([0, 1])


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
        lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    ],
)
def test_what_a_hook_makes_anew_may_be_an_attribute(make: Callable[[], nn.Module]) -> None:
    module = nn.Sequential(make())
    check_replicable(module, [CPU, META])
    replicas = copies(module, 1)
    module[0](torch.zeros(1, 2)).sum().backward()
    replicas.refresh([0, 1])
    module.eval()  # of spectral norm: no iteration of its power method
    replicas[1].eval()
    x = torch.randn(3, 2)
    assert torch.equal(replicas[1](x), module(x))
