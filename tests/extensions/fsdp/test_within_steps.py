"""Values, gradients and switches of parameters in shards, read and changed by steps, against one device, in float64."""

import copy
import pickle
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, prune, vector_to_parameters

from equipoise.extensions.fsdp.within_steps.seen_parameters import PartlyFreed
from equipoise.interop.torch.dispatch import change_class
from tests.extensions.fsdp.programs import (
    Net,
    assert_refused_in_processes,
    assert_same_cases,
    fit,
    fsdp,
    weights_of,
)

Step = Callable[[Any, Any, int], Any]


class Student(Net):
    """A teacher, of whose blocks some are units, a parameter of its own, and a tied weight in the root."""

    step: Step

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.back = nn.Linear(7, 8, bias=False)
        self.back.weight = nn.Parameter(self.first.weight.detach().T.contiguous())
        self.again = nn.Linear(8, 7, bias=False)
        self.again.weight = self.first.weight
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(7))
        self.automatic_optimization = not by_hand
        self.averages: list[Tensor] = []

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features + self.back(self.again(features)))

    def loss(self, batch: Any) -> Tensor:
        hidden = self.first(batch[0]) * self.scale
        for block in self.teacher:
            hidden = block(hidden)
        return super().loss(batch) + hidden.square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return type(self).step(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.02, momentum=0.9)

    def trained(self) -> list[Any]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


# Steps of manual optimisation.


def step_after(module: Any, backward: Callable[[], Any], change: Callable[[], Any] | None = None) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    backward()
    if change is not None:
        change()
    optimizer.step()


def plain(module: Any, batch: Any, batch_idx: int) -> None:
    step_after(module, lambda: module.loss(batch).backward())


def several(module: Any, batch: Any, batch_idx: int) -> None:
    def backward() -> None:
        module.manual_backward(module.loss(batch))
        torch.autograd.backward(module(batch[0]).square().mean())
        output = module(batch[0])
        output.mean().backward(retain_graph=True)
        output.abs().mean().backward(inputs=module.trained())

    parameters = list(module.parameters())
    step_after(module, backward, lambda: clip_grad_norm_(parameters, 0.05))


def switched(module: Any, batch: Any, batch_idx: int) -> None:
    """Freezes parts between two backwards, and one layer until the next step."""

    def backward() -> None:
        module.manual_backward(module.loss(batch))
        module.first.requires_grad_(False)
        module.blocks[0].up.requires_grad_(False)
        module.manual_backward(module(batch[0]).square().mean())
        module.blocks[0].up.requires_grad_(True)
        module.first.requires_grad_(True)

    step_after(module, backward, lambda: module.last.bias.requires_grad_(batch_idx != 1))


def written(module: Any, batch: Any, batch_idx: int) -> None:
    parameters = module.trained()
    for parameter, gradient in zip(parameters, torch.autograd.grad(module.loss(batch), parameters), strict=True):
        parameter.grad = gradient
    module.optimizers().step()


def sharpness_aware(module: Any, batch: Any, batch_idx: int) -> None:
    optimizer = module.optimizers()
    parameters = list(module.parameters())
    optimizer.zero_grad()
    module.manual_backward(module.loss(batch))
    moved = [parameter for parameter in parameters if parameter.grad is not None]
    former = [parameter.data.clone() for parameter in moved]
    with torch.no_grad():
        norm = torch.stack([parameter.grad.norm() for parameter in moved]).norm()
        for parameter in moved:
            parameter.add_(parameter.grad * (0.05 / (norm + 1e-12)))
    optimizer.zero_grad()
    module.manual_backward(module.loss(batch))
    for parameter, data in zip(moved, former, strict=True):
        parameter.data = data
    optimizer.step()


def noisy(module: Any, batch: Any, batch_idx: int) -> None:
    draw = torch.Generator().manual_seed(batch_idx)

    def change() -> None:
        for parameter in module.trained():
            noise = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
            parameter.grad.add_(noise, alpha=0.01)
            parameter.grad = parameter.grad + noise * 0.01
            parameter.grad += 0.01 * parameter.detach()
            parameter.grad.copy_(parameter.grad.clone() * noise.square())
            # A view, also of a shard.
            parameter.grad.unsqueeze(0).mul_(0.9)

    step_after(module, lambda: module.manual_backward(module.loss(batch)), change)


def redrawn(module: Any, batch: Any, batch_idx: int) -> None:
    for parameter in module.trained():
        parameter.data.clamp_(-0.3, 0.3)
    module.scale.detach().apply_(lambda value: value / 2)
    plain(module, batch, batch_idx)
    module.log("norm", sum(parameter.norm() for parameter in module.parameters()), on_epoch=True)
    with torch.no_grad():
        vector_to_parameters(parameters_to_vector(module.trained()) * 0.99, module.trained())
        if batch_idx == 2:
            torch.manual_seed(5)
            module.first.reset_parameters()
            for parameter in module.blocks[1].parameters():
                nn.init.normal_(parameter, 0.0, 0.1)
        module.scale[0] = 0.5
        torch._foreach_mul_(list(module.last.parameters()), 0.9)


def afterwards(module: Any, batch: Any, batch_idx: int) -> None:
    """Computes with weights after a backward: of the root, of a unit, and of a copy that is made within the step."""
    step_after(module, lambda: module.manual_backward(module.loss(batch)))
    with torch.no_grad():
        target = copy.deepcopy(module.blocks)[0](batch[0][:, :7])
    weight = module.blocks[1].up.weight
    penalty = sum(parameter.square().sum() for parameter in module.trained())
    hidden = nn.functional.linear(batch[0][:, :7] * module.scale.exp(), weight)
    step_after(module, lambda: (hidden.square().mean() + target.mean() * penalty * 0.01).backward())


def loaded(module: Any, batch: Any, batch_idx: int) -> None:
    state = {name: value.clone() for name, value in module.state_dict().items()}
    plain(module, batch, batch_idx)
    if batch_idx % 2:
        module.load_state_dict(state)
    module.teacher.load_state_dict(module.blocks.state_dict())


# Steps of automatic optimisation.


def penalised(module: Any, batch: Any, batch_idx: int) -> Tensor:
    """Returns a gradient penalty, after whose graph the network computes once more."""
    features = batch[0].clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(module(features).sum(), features, create_graph=True)
    return gradient.square().sum(1).mean() + module.loss(batch)


def constrained(module: Any, batch: Any, batch_idx: int) -> Tensor:
    parameters = module.trained()
    with torch.no_grad():
        for parameter in parameters:
            parameter.clamp_(-0.3, 0.3)
        torch.manual_seed(batch_idx)
        module.blocks[1].up.weight.add_(torch.randn_like(module.blocks[1].up.weight), alpha=0.01)
    module.last.weight.data = torch.renorm(module.last.weight.data, 2, 0, 0.3)
    loss = module.loss(batch)
    # Shards of before the forward, of which units that keep their weights have whole ones now.
    return loss + 0.01 * sum(parameter.square().sum() for parameter in parameters)


def averaged(module: Any, batch: Any, batch_idx: int) -> Tensor:
    """The teacher follows the student before the forward, and copies of all parameters after it."""
    if not module.averages:
        module.averages = [parameter.detach().clone() for parameter in module.trained()]
    with torch.no_grad():
        for slow, fast in zip(module.teacher.parameters(), module.blocks.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)
    loss = module.loss(batch)
    with torch.no_grad():
        for average, parameter in zip(module.averages, module.trained(), strict=True):
            average.lerp_(parameter, 0.1)
        # The graph of the loss does not need the bias of before.
        module.last.bias.data.copy_(module.last.bias * 0.9)
    return loss


def halved(module: Any, batch: Any, batch_idx: int) -> Tensor:
    for parameter in module.trained():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    return module.loss(batch)


def called_with(module: Any, network: Any, batch: Any) -> Tensor:
    weights = {name: 0.9 * parameter for name, parameter in module.blocks[1].named_parameters()}
    hidden = module.first(batch[0])
    with torch.no_grad():
        wanted = torch.func.functional_call(network, weights, (hidden,))
    return module.loss(batch) + (module.blocks[1](hidden) - wanted).square().mean()


def other_weights(module: Any, batch: Any, batch_idx: int) -> Tensor:
    return called_with(module, copy.deepcopy(module.blocks[1]), batch)


class Constrained(nn.Linear):
    def forward(self, features: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        with torch.no_grad():
            self.bias.clamp_(-0.1, 0.1)
        return super().forward(features)


BY_HAND: dict[str, Step] = {
    step.__name__: step
    for step in (
        *(several, switched, written, sharpness_aware, noisy, redrawn, afterwards),
        loaded,
    )
}
AUTOMATIC: dict[str, Step] = {step.__name__: step for step in (penalised, constrained, averaged, halved, other_weights)}
UNITS: dict[str, dict[str, Any]] = {
    "automatic": {},
    "one": {"units": []},
    "named": {"units": ["blocks.*.up", "blocks.1", "teacher.2", "last"]},
    "kept": {"reshard_after_forward": False},
}


def program(name: str) -> Any:
    """Return a module whose step has this name; "within a forward" changes weights in its layers."""
    if name == "within a forward":
        module = Student(by_hand=False)
        for block in module.blocks:
            block.up = Constrained(7, 14)  # type: ignore[assignment]
        step: Step = lambda module, batch, batch_idx: module.loss(batch)  # noqa: E731
    else:
        module = Student(by_hand=name not in AUTOMATIC)
        step = {**BY_HAND, **AUTOMATIC}[name]
    module.__class__ = type("Program", (Student,), {"step": staticmethod(step)})
    return module


NAMES = [*BY_HAND, *AUTOMATIC, "within a forward"]


@cache
def trained(name: str, epochs: int, units: str = "", processes: int = 1) -> dict[str, Any]:
    strategy: Any = fsdp(**UNITS[units]) if units else "single_device"
    # The last step has 11 samples, which the processes cannot share evenly.
    options = {"count": 47, "max_epochs": epochs, "accumulate_grad_batches": 1 + (name == "halved")}
    module, trainer = fit(partial(program, name), strategy, processes, **options)
    return {**weights_of(module), **trainer.callback_metrics}


# They change weights, which would stay in whole ones that are kept.
OF_WEIGHTS = [
    *("sharpness_aware", "redrawn", "afterwards", "loaded"),
    *("constrained", "averaged", "other_weights", "within a forward"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("units", "processes", "epochs", "names"),
    [
        ("automatic", 2, 1, NAMES),
        # A second epoch begins with units that were freed.
        pytest.param("one", 2, 2, NAMES, marks=pytest.mark.slow),
        pytest.param("named", 3, 1, NAMES, marks=pytest.mark.slow),
        pytest.param("kept", 2, 1, OF_WEIGHTS, marks=pytest.mark.slow),
    ],
    ids=["automatic", "one", "named", "kept"],
)
def test_what_a_step_does_with_parameters_has_the_effect_of_one_device(
    units: str, processes: int, epochs: int, names: list[str]
) -> None:
    in_shards = partial(trained, epochs=epochs, units=units, processes=processes)
    assert_same_cases(processes, names, partial(trained, epochs=epochs), in_shards)


# What is refused


def with_its_own_block(module: Any, batch: Any, batch_idx: int) -> Tensor:
    """Computes a block of its own with other weights."""
    return called_with(module, module.blocks[1], batch)


def assigned(module: Any, batch: Any, batch_idx: int) -> None:
    """Assigns what follows from the samples of a process."""
    for parameter in module.trained():
        parameter.grad = torch.full(parameter.shape, float(batch[0].mean()), dtype=parameter.dtype)
    module.optimizers().step()


def changed_by_its_samples(module: Any, batch: Any, batch_idx: int) -> None:
    """Adds to gradients what follows from the samples of a process."""
    module.loss(batch).backward()
    for parameter in module.trained():
        parameter.grad.add_(torch.full(parameter.shape, float(batch[0].mean()), dtype=parameter.dtype))
    module.optimizers().step()


def made_of_a_weight(module: Any, batch: Any, batch_idx: int) -> None:
    nn.Parameter(module.first.weight)


def divided_by_a_norm(module: Any, batch: Any, batch_idx: int) -> Tensor:
    """Takes the norm of a gradient of the samples of a process."""
    loss = module.loss(batch)
    (gradient,) = torch.autograd.grad(loss, module.last.weight, retain_graph=True)
    return loss / gradient.norm()


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))


class Pruned(Net):
    def on_train_epoch_start(self) -> None:
        prune.l1_unstructured(self.first, "weight", amount=0.5)


class Grown(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.another = nn.Linear(2, 2)


class ByElement(Net):
    """Calls a function for each element of a weight, where it is in shards."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.last.weight.data.apply_(lambda value: value / 2)


class JoinsGradients(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def stepping(step: Step, by_hand: bool = True) -> Callable[[], Any]:
    kind: Any = type("Program", (Student,), {"step": staticmethod(step)})
    return partial(kind, by_hand=by_hand)


REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "no dimension": (Scaled, ["ConfigurationError: temperature is a ", "without a dimension", "torch.ones"]),
    "pruned": (Pruned, ["StepError: The module gets 'weight_orig' within a run"]),
    "grown": (Grown, ["StepError: The module gets 'another' within a run"]),
    "by element": (ByElement, ["`apply_` calls a function for each element", "weight.copy_(function(weight))"]),
    "joined": (JoinsGradients, ["ConfigurationError: LBFGS joins all gradients"]),
    "assigned": (stepping(assigned), ["StepError: The processes have assigned different gradients"]),
    "changed": (stepping(changed_by_its_samples), ["StepError: The processes change ", "by different values"]),
    "norm": (
        stepping(divided_by_a_norm, by_hand=False),
        ["StepError: ", "was asked for gradients of parameters", "in automatic optimisation"],
    ),
    "made of a weight": (stepping(made_of_a_weight), ["StepError: A parameter was made of a weight", "clone()"]),
    "other weights": (stepping(with_its_own_block, by_hand=False), ["StepError: ", "was replaced within a step"]),
}


@pytest.mark.thorough
def test_changes_that_differ_between_processes_or_parameters_that_come_and_go_are_refused() -> None:
    runs = {name: partial(fit, kind, fsdp(), 2, count=48) for name, (kind, _) in REFUSED.items()}
    assert_refused_in_processes(2, runs, REFUSED)


class Alone(Net):
    """A step by hand, at one place of which the first process alone does more."""

    def __init__(self, place: str, more: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.place, self.more = place, more

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.reach("before", batch)
        step_after(self, lambda: self.manual_backward(self.loss(batch)), lambda: self.reach("within", batch))
        self.reach("after", batch)

    def reach(self, place: str, batch: Any) -> None:
        if self.global_rank == 0 and place == self.place:
            self.more(self, batch)


MORE: dict[str, Callable[[Any, Any], Any]] = {
    "forward": lambda module, batch: module(batch[0]),
    "part": lambda module, batch: module.blocks[1](module.first(batch[0])),
    "backward": lambda module, batch: module.loss(batch).backward(),
    "attack": lambda module, batch: torch.autograd.grad(module(batch[0].requires_grad_()).sum(), batch[0]),
}


@pytest.mark.thorough
def test_a_process_that_computes_more_than_others_is_refused_in_all_of_them() -> None:
    cases = [(place, more, {}) for place in ("before", "within", "after") for more in MORE]
    cases += [("before", "backward", {"units": []}), ("after", "forward", {"units": []})]
    runs = {
        f"{more} {place} {options}": partial(fit, partial(Alone, place, MORE[more]), fsdp(**options), 2, count=48)
        for place, more, options in cases
    }
    words = (["StepError: Rank 0 ", ", while rank 1 ", " the same order"],)
    assert_refused_in_processes(2, runs, dict.fromkeys(runs, words))


def partly_freed(mesh: DeviceMesh) -> nn.Parameter:
    """Return a weight that lies over some processes between its forward and its backward."""
    weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
    change_class(weight, PartlyFreed)
    return weight


class Pickles(Net):
    """One process alone pickles weights: one of the root, which is whole in a step, and one in shards."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.whole = [self.first.weight]
        self.pickle(self.first.weight, nn.Parameter)
        self.pickle(self.blocks[0].up.weight, DTensor)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.pickle(partly_freed(self.first.weight.device_mesh), DTensor)
        # The whole one of the step, which was freed, stands for its shard.
        freed = pickle.loads(pickle.dumps(self.whole[0]))
        # Torch makes parameters of tensors whose values `detach` returns in the same class.
        for weight in (freed, nn.Parameter(self.first.weight.data)):
            assert torch.equal(weight.to_local(), self.first.weight.to_local())

    def pickle(self, weight: Any, kind: type) -> None:
        if self.global_rank == 0:
            weight.mark = "m"
            pickled = pickle.loads(pickle.dumps(weight))
            assert type(pickled) is kind
            assert (pickled.requires_grad, pickled.mark, "_seen" in vars(pickled)) == (True, "m", False)
            assert torch.equal(*(getattr(each, "to_local", each.detach)() for each in (weight, pickled)))


@pytest.mark.thorough
def test_parameters_are_pickled_and_made_of_others() -> None:
    fit(Pickles, fsdp(), 2, max_epochs=1)
