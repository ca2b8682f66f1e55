"""Gradients summed in buckets by real processes: the sums, who has none, the weight, and when they are exchanged."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equipoise import StepError
from equipoise.parallel.communication.gradient_reducer import GradientReducer
from tests.support.equality import assert_equal
from tests.support.process_groups import cases_in_group, in_group

ONE_EACH, SMALL, LARGE = 1e-9, 2e-4, 25.0  # MiB: a bucket for every parameter, some buckets, one for each dtype

Gradients = list[Tensor | None]


def gradients(module: nn.Module) -> Gradients:
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


@contextmanager
def exchanges() -> Iterator[mock.Mock]:
    """Counts exchanges, and lets them happen."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
        yield counted


def memories(module: nn.Module) -> list[int]:
    """Return the addresses of the gradients' memory, which they share."""
    return [p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.grad is not None]


# Sums


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)]
    return nn.Sequential(*layers).double()


def samples() -> Tensor:
    return torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Mixed(nn.Module):
    """Parameters of several dtypes, whose gradients every one of them can hold exactly."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(3, n + 1, dtype=d)) for n, d in enumerate(dtypes))

    def loss(self, factor: float, used: range | None = None) -> Tensor:
        """One whose gradient is the factor times the number of the parameter, from 1."""
        terms = [(part * (factor * (number + 1))).double().sum() for number, part in enumerate(self.parts)]
        return torch.stack([terms[number] for number in used or range(len(terms))]).sum()


# Who has none


class Parts(nn.Module):
    """Parameters that some processes use."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.here, self.there, self.nobodys, self.frozen = (
            nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(5)
        )
        self.frozen.requires_grad_(False)


def missing(rank: int, megabytes: float) -> list[tuple[list[Any], float]]:
    """The values of all gradients, and the weight, in every window."""
    module = Parts()
    reducer, found = GradientReducer(module.parameters(), megabytes), []
    used: list[tuple[nn.Parameter, ...]] = [
        (module.both, module.here, module.there, module.nobodys, module.frozen),  # leaves sums in the buckets
        (module.both, module.there if rank else module.here),
        () if rank else (module.both, module.here),
        (),
    ]
    for eager in (True, False):
        for parameters in used:
            module.zero_grad()
            reducer.begin(len(parameters), eager=eager)
            if parameters:
                (torch.stack([p.sum() for p in parameters]).sum() * (rank + 1)).backward()
            reducer.finish()
            values = [None if gradient is None else gradient.tolist() for gradient in gradients(module)]
            found.append((values, float(reducer.total())))
    return found


def test_a_gradient_that_one_process_lacks_is_that_of_the_others() -> None:
    """Of both, here, there, nobody's and a frozen parameter."""
    expected = [
        ([[3, 3], [3, 3], [3, 3], [3, 3], None], 10),
        ([[3, 3], [1, 1], [2, 2], None, None], 4),
        ([[1, 1], [1, 1], None, None, None], 2),
        ([None] * 5, 0),
    ]
    assert cases_in_group(missing, [[ONE_EACH], [LARGE]]) == [[expected * 2] * 2] * 2


# The weight

WEIGHTS: list[tuple[tuple[Any, Any], float]] = [
    ((257, 300), 557),
    ((257, 300), 557),  # the same once more
    ((1, 0), 1),
    ((2.5, 0.25), 2.75),
    ((torch.tensor(257), torch.tensor(300)), 557),
    ((torch.tensor(70001.0), 3), 70004),
    ((5, 6), 11),
    ((0, 0), 0),
]


def weights(rank: int, dtypes: tuple[torch.dtype, ...]) -> list[tuple[list[int], float, list[Any]]]:
    """Return sums with all gradients, and with those that the second process lacks."""
    module = Mixed(dtypes)
    reducer, found = GradientReducer(module.parameters()), []
    for used in (None, range(1) if rank else None):
        for given, _ in WEIGHTS:
            module.zero_grad()
            reducer.begin(given[rank])
            module.loss(rank + 1, used).backward()
            reducer.finish()
            total = reducer.total()
            sums = [gradient.unique().tolist() for gradient in gradients(module) if gradient is not None]
            found.append((list(total.shape), float(total), sums))
    return found


DTYPES = [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64,) * 2]


def test_the_weight_is_exact_whatever_the_dtype_of_gradients() -> None:
    """Also where bfloat16 would make 557 from 257 and 300 out to be 556, and whatever it was before."""
    expected = [([], total, [[3], [of_both]]) for of_both in (6, 2) for _, total in WEIGHTS]
    for dtypes, answers in zip(DTYPES, cases_in_group(weights, [[dtypes] for dtypes in DTYPES]), strict=True):
        assert answers == [expected] * 2, dtypes


# When they are exchanged


def of_a_backward(rank: int, megabytes: float, eager: bool) -> list[int]:
    """The exchanges before the backward, when it reaches the input, and at its end."""
    module, features = network(), samples()[0].requires_grad_()
    reducer = GradientReducer(module.parameters(), megabytes)
    counts: list[int] = []
    with exchanges() as counted:
        module(features).sum().backward()  # of an earlier part of the window
        counts.append(counted.call_count)
        features.register_hook(lambda gradient: counts.append(counted.call_count))
        reducer.begin(eager=eager)
        module(features).sum().backward()
        reducer.finish()
        counts.append(counted.call_count)
    return counts


def test_exchanges_begin_while_the_backward_runs() -> None:
    eager, *at_the_end = cases_in_group(of_a_backward, [(ONE_EACH, True), (ONE_EACH, False), (LARGE, False)])
    for before, within, after in eager:
        assert (before, after) == (0, 6)
        assert 4 <= within <= 6
    assert at_the_end == [[[0, 0, 6]] * 2, [[0, 0, 1]] * 2]


def in_the_buckets(rank: int, megabytes: float) -> tuple[list[list[int]], int]:
    module = network()
    reducer, found = GradientReducer(module.parameters(), megabytes), []
    for window in samples():
        module.zero_grad()
        reducer.begin()
        module(window[rank::2]).sum().backward()
        reducer.finish()
        found.append(memories(module))
    return found, len(set(memories(module)))


def test_gradients_lie_in_the_buckets() -> None:
    """The same memory in every window; no second copy of them is held."""
    for buckets, answers in zip((6, 3, 1), cases_in_group(in_the_buckets, [[ONE_EACH], [SMALL], [LARGE]]), strict=True):
        for found, count in answers:
            assert found == [found[0]] * 3
            assert count == buckets


class Shared(nn.Module):
    """A layer that is used twice, once inside a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def loss(self, features: Tensor, reentrant: bool) -> Tensor:
        hidden = checkpoint(self.layer, features, use_reentrant=reentrant)
        return self.layer(hidden).square().sum()


def checkpointed(rank: int, reentrant: bool, eager: bool) -> str:
    torch.manual_seed(4)
    one, module, features = Shared(), Shared(), samples()[0].requires_grad_()
    one.load_state_dict(module.state_dict())
    one.loss(features, False).backward()
    reducer = GradientReducer(module.parameters(), ONE_EACH)
    reducer.begin(eager=eager)
    try:
        module.loss(features[rank::2], reentrant).backward()
    except StepError as error:
        return str(error)
    reducer.finish()
    assert_equal(gradients(one), gradients(module), 1e-12)
    return ""


def test_a_shared_weight_in_a_checkpoint() -> None:
    """Torch's reentrant checkpoints add to a gradient twice, and the first part may be gone already."""
    refused, *computed = cases_in_group(checkpointed, [(True, True), (False, True), (True, False)])
    assert computed == [["", ""]] * 2
    for message in refused:
        assert "got a part of its gradient after the exchange had begun" in message
        assert "use_reentrant=False" in message


def closed(rank: int) -> tuple[int, list[Any]]:
    module = Mixed((torch.float64, torch.bfloat16))
    first = GradientReducer(module.parameters(), ONE_EACH)
    first.begin()
    first.close()
    with exchanges() as counted:
        module.loss(rank + 1).backward()
    module.zero_grad()
    second = GradientReducer(module.parameters(), ONE_EACH)
    second.begin()
    module.loss(rank + 1).backward()
    second.finish()
    return counted.call_count, [gradient.unique().tolist() for gradient in gradients(module) if gradient is not None]


def test_a_closed_reducer_exchanges_nothing() -> None:
    assert in_group(closed) == [(0, [[3], [6]])] * 2
