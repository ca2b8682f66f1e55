"""Small networks, each with one property that makes a forward hard to follow."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import dropout, embedding, linear
from torch.utils.checkpoint import checkpoint

__all__ = ["PROPERTIES", "Property", "Task"]

WIDTH = 6
RATE = 0.1

Batch = tuple[Any, ...]


class Net(nn.Module):
    """Layers around one that has the property.

    Args:
        middle: That layer.
    """

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = middle
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        middle = self.middle(torch.tanh(self.first(x)), *others)
        result: Tensor = self.last(torch.tanh(self.second(middle)))
        return result


class Task(L.LightningModule):
    """Trains a network.

    Args:
        net: The network.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @property
    def network(self) -> nn.Module:
        """The module that a step calls."""
        return self.net

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.network(*batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)


def _nothing(*arguments: Any) -> Any:
    """Do nothing, and return nothing."""


@dataclass(frozen=True)
class Property:
    """A property of a network.

    Attributes:
        name: Its name in the table.
        make: Builds the layer with the property, or the whole task.
        inputs: Draws what the network is called with beside its first input, for so many samples and the index of a
            batch.
        sizes: The samples of the batches.
        length: The size of a second dimension of the first input, for the index of a batch; None: there is none.
        between: Changes the task before the batch of an index.
        most: The largest difference of equal numbers, as a share of the largest.
        look: What is compared beside weights, buffers, logged values, arguments, prints and generators.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, int, Generator], Batch] = lambda size, index, generator: ()
    sizes: Sequence[int] = (4, 4, 3, 2, 1)
    length: Callable[[int], int | None] = lambda index: None
    between: Callable[[int, Task], None] = _nothing
    most: float = 1e-12
    look: Callable[[Task], Any] = _nothing

    def task(self) -> Task:
        """A new task."""
        made = self.make()
        return made if isinstance(made, Task) else Task(Net(made))

    def batches(self) -> list[Batch]:
        """The batches, equal in each run."""
        generator = Generator().manual_seed(1)
        found = []
        for index, size in enumerate(self.sizes):
            length = self.length(index)
            shape = (size, WIDTH) if length is None else (size, length, WIDTH)
            x = torch.randn(*shape, dtype=torch.float64, generator=generator)
            found.append((x, *self.inputs(size, index, generator)))
        return found


class Layer(nn.Module):
    """A linear layer, with what a forward may change. Its forward is the property's."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.seen: list[Any] = []
        self.number = 0
        for name, value in attributes.items():
            setattr(self, name, value)


PROPERTIES: list[Property] = []


def _property(name: str, **options: Any) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Add a property of a layer with the decorated forward."""
    attributes = options.pop("attributes", dict)

    def add(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        kind = type(forward.__name__, (Layer,), {"forward": forward})
        PROPERTIES.append(Property(name, lambda: kind(**attributes()), **options))
        return forward

    return add


def _layer(name: str, make: Callable[[], nn.Module], **options: Any) -> None:
    """Add a property that a layer or a task has."""
    PROPERTIES.append(Property(name, make, **options))


def _middle(task: Task) -> Any:
    """The layer with the property."""
    return task.net.middle


# Random numbers.


@_property("dropout")
def _dropout(self: Any, x: Tensor) -> Tensor:
    return dropout(self.linear(x), 0.5, self.training)


@_property("`torch.rand` in the forward")
def _rand(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * torch.rand(x.shape, dtype=x.dtype)


@_property("a generator of its own", attributes=lambda: {"generator": Generator().manual_seed(3)})
def _generator(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * torch.rand(x.shape, dtype=x.dtype, generator=self.generator)


@_property("`random.random()` in the forward")
def _python_random(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * random.random()


# State.

_layer(
    "BatchNorm: statistics and their counter",
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
    sizes=(4, 4, 3, 2),
)


@_property("a buffer changed in place")
def _buffer(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return self.linear(x) * self.count


@_property("a buffer assigned anew")
def _assigned(self: Any, x: Tensor) -> Tensor:
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
    return self.linear(x - self.mean)


@_property("`self.number += 1`", look=lambda task: _middle(task).number)
def _number(self: Any, x: Tensor) -> Tensor:
    self.number += 1
    return self.linear(x) * self.number


def _set_scale(index: int, task: Task) -> None:
    _middle(task).scale = 1.0 + index


@_property("a number in an attribute, changed between steps", between=_set_scale, attributes=lambda: {"scale": 1.0})
def _scale(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * self.scale


@_property("a list that the forward fills", look=lambda task: [value.sum() for value in _middle(task).seen])
def _list(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x.detach())
    return self.linear(x)


@_property("`print` in the forward")
def _print(self: Any, x: Tensor) -> Tensor:
    print("called")
    return self.linear(x)


class _LogsInForward(Task):
    def __init__(self) -> None:
        super().__init__(Net(nn.Linear(WIDTH, WIDTH)))

    @property
    def network(self) -> nn.Module:
        return self

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        self.log("norm", result.norm())
        return result


_layer("`self.log` in the forward", _LogsInForward)


class _ReadsStep(_LogsInForward):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result * (1 + self.global_step)


_layer("`self.global_step` in the forward", _ReadsStep)


@_property(
    "arguments changed in place",
    inputs=lambda size, index, generator: (torch.ones(size, 1, dtype=torch.float64),),
)
def _in_place(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    mask.mul_(2)
    return self.linear(x) * mask


# Modes.


@_property("autocast to bfloat16 in the forward", most=1e-2)  # a difference of rounding may be one of 8 bits there
def _autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        result = linear(x.float(), self.linear.weight.float())
    return result.to(x.dtype)


@_property("`torch.no_grad` in the forward")
def _no_grad(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        weights = torch.softmax(self.linear(x), -1)
    return self.linear(x) * weights


def _checkpointed(self: Any, x: Tensor, use_reentrant: bool) -> Tensor:
    def block(value: Tensor) -> Tensor:
        return dropout(torch.tanh(self.linear(value)), 0.5, self.training)

    result: Tensor = checkpoint(block, x, use_reentrant=use_reentrant)
    return result


@_property("checkpoint, `use_reentrant=False`, with dropout")
def _new_checkpoint(self: Any, x: Tensor) -> Tensor:
    return _checkpointed(self, x, use_reentrant=False)


@_property("checkpoint, `use_reentrant=True`, with dropout")
def _old_checkpoint(self: Any, x: Tensor) -> Tensor:
    return _checkpointed(self, x, use_reentrant=True)


def _set_flag(index: int, task: Task) -> None:
    _middle(task).flag = index > 1


@_property("checkpoint by a flag that is set later", between=_set_flag, attributes=lambda: {"flag": False})
def _flagged_checkpoint(self: Any, x: Tensor) -> Tensor:
    if self.flag and self.training:
        return _checkpointed(self, x, use_reentrant=False)
    return torch.tanh(self.linear(x))


def _alternate(index: int, task: Task) -> None:
    _middle(task).train(index % 2 == 0)


_layer("a layer in eval mode in every second step", lambda: nn.Sequential(nn.Dropout(0.5)), between=_alternate)


# Layers.


class _Reversed(torch.autograd.Function):
    """Returns its argument, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -0.5 * gradients[0]


@_property("an autograd function with a backward of its own")
def _function(self: Any, x: Tensor) -> Tensor:
    result: Tensor = _Reversed.apply(self.linear(x))
    return result


def _hooked(register: Callable[[nn.Module], Any]) -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    register(layer)
    return nn.Sequential(layer)


_layer(
    "a forward hook that changes the output",
    partial(_hooked, lambda layer: layer.register_forward_hook(lambda module, args, output: 2 * output)),
)


def _pre_hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (kwargs["value"] + 1,), {}


class _CallsByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.register_forward_pre_hook(_pre_hook, with_kwargs=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(value=x)
        return result


_layer("a forward pre-hook with keywords", _CallsByKeyword)
_layer(
    "a backward hook that doubles gradients",
    partial(
        _hooked,
        lambda layer: layer.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],)),
    ),
)


def _add_hook(index: int, task: Task) -> None:
    if index == 2:
        task.net.second.register_forward_hook(lambda module, args, output: 2 * output)


_layer("a forward hook that is registered later", lambda: nn.Linear(WIDTH, WIDTH), between=_add_hook)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.other(torch.tanh(self.one(x)))
        return result


_layer("tied weights", _Tied)


def _frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _thaw(index: int, task: Task) -> None:
    if index == 2:
        _middle(task).requires_grad_(True)


_layer("a frozen layer", _frozen)
_layer("a frozen layer that is trained later", _frozen, between=_thaw)


def _replace(index: int, task: Task) -> None:
    if index == 2:
        optimizer = task.optimizers()
        old = task.net.second.weight
        task.net.second.weight = nn.Parameter(torch.full_like(old, 0.5))
        group = optimizer.param_groups[0]["params"]
        group[[id(each) for each in group].index(id(old))] = task.net.second.weight


_layer("a parameter that is replaced later", lambda: nn.Linear(WIDTH, WIDTH), between=_replace)


class _Lora(nn.Module):
    """Adds to a frozen layer, whose forward it replaces, as some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        whole = self.base.forward
        self.base.forward = lambda x: whole(x) + self.up(self.down(x))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x)
        return result


_layer("a wrapped layer, as of LoRA, whose forward is replaced", _Lora)


# Values between modules.


@dataclass
class _Pair:
    one: Tensor
    others: dict[str, list[Tensor]] = field(default_factory=dict)


class _MakesPair(nn.Module):
    def forward(self, x: Tensor) -> _Pair:
        return _Pair(x, {"a": [x + 1, x * 2]})


class _TakesPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: _Pair) -> Tensor:
        result: Tensor = self.layer(pair.one + pair.others["a"][1])
        return result


_layer(
    "a dataclass with a dictionary of lists between modules",
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), _MakesPair(), _TakesPair()),
)


class _Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        result, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.size(1))
        return result


_layer(
    "packed sequences through an LSTM",
    _Packs,
    inputs=lambda size, index, generator: (torch.tensor([5, 3, 4, 2])[:size],),
    length=lambda index: 5,
)
_layer("an LSTM", lambda: _First(nn.LSTM(WIDTH, WIDTH, batch_first=True)), length=lambda index: 5)


class _First(nn.Module):
    """The first value of those that a layer returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)[0]
        return result


_layer("another length", lambda: nn.Linear(WIDTH, WIDTH), length=lambda index: 5 + index)


@_property("a number among the arguments, another in each step", inputs=lambda size, index, generator: (1 + index,))
def _number_given(self: Any, x: Tensor, number: int) -> Tensor:
    return self.linear(x) * number


def _mask_or_none(size: int, index: int, generator: Generator) -> Batch:
    return (None if index % 2 else torch.rand(size, WIDTH, dtype=torch.float64, generator=generator),)


@_property("an argument that is None in every second step", inputs=_mask_or_none)
def _optional(self: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    return self.linear(x if mask is None else x * mask)


# Questions.


@_property("`if x.sum() > 0` about a value of a layer")
def _if_value(self: Any, x: Tensor) -> Tensor:
    if self.linear(x).sum() > 0:
        return 2 * self.linear(x)
    return -self.linear(x)


def _full_or_not(size: int, index: int, generator: Generator) -> Batch:
    mask = torch.ones(size, WIDTH, dtype=torch.bool)
    mask[0, 0] = index % 2 == 0
    return (mask,)


@_property("`if mask.all()` about an argument", inputs=_full_or_not)
def _if_mask(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    if mask.all():
        return 2 * self.linear(x)
    return self.linear(x * mask)


@_property("`if x.size(0) > 3`")
def _if_size(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * (2 if x.size(0) > 3 else 3)


@_property("`x.max().item()` as a factor")
def _item(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * x.max().item()


@_property("`nonzero`: a shape that depends on values")
def _nonzero(self: Any, x: Tensor) -> Tensor:
    rows = (x[:, 0] > -10).nonzero()[:, 0]
    return self.linear(x[rows])


@_property("an assertion about values that holds, by `assert`")
def _assert(self: Any, x: Tensor) -> Tensor:
    assert torch.isfinite(x).all(), "not finite"
    return self.linear(x)


# Gradients.


class _Penalty(Task):
    """Adds the norm of the gradient of its input to the loss."""

    def __init__(self) -> None:
        super().__init__(Net(nn.Linear(WIDTH, WIDTH)))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x = batch[0].detach().requires_grad_()
        output = self.net(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss: Tensor = output.square().mean() + gradient.square().mean()
        return loss


_layer("double backward in the step", _Penalty)


def _fails(self: Any, x: Tensor, words: Tensor) -> Tensor:
    """Ask for a row that a table does not have, in the third batch."""
    return self.linear(x) + embedding(words, self.linear.weight)


_property(
    "an error in the forward names the user's line",
    inputs=lambda size, index, generator: (torch.full((size,), 100 * (index == 2)),),
)(_fails)
