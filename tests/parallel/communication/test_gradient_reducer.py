"""Gradients summed in buckets by real processes: the sums, who has none, the weight, and when they are exchanged."""

import itertools
import weakref
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

    DTYPES = (torch.float64, torch.bfloat16, torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)

    def __init__(self, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(3, n + 1, dtype=d)) for n, d in enumerate(dtypes))

    def loss(self, factor: float, used: range | None = None) -> Tensor:
        """One whose gradient is the factor times the number of the parameter, from 1."""
        terms = [(part * (factor * (number + 1))).double().sum() for number, part in enumerate(self.parts)]
        return torch.stack([terms[number] for number in used or range(len(terms))]).sum()


def of_several_dtypes(rank: int, megabytes: float) -> tuple[list[Gradients], list[torch.dtype]]:
    module = Mixed()
    reducer, found = GradientReducer(module.parameters(), megabytes), []
    for window in range(2):
        module.zero_grad()
        reducer.begin()
        module.loss(1 + 2 * rank + window).backward()
        reducer.finish()
        found.append(gradients(module))
    return found, [p.grad.dtype for p in module.parameters() if p.grad is not None]


def test_gradients_of_several_dtypes_are_summed() -> None:
    for found, dtypes in itertools.chain(*cases_in_group(of_several_dtypes, [[ONE_EACH], [LARGE]])):
        assert dtypes == list(Mixed.DTYPES)
        for window, sums in enumerate(found):
            for number, gradient in enumerate(sums, start=1):
                assert gradient is not None
                assert gradient.unique().tolist() == [number * (1 + 3 + 2 * window)]


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


def kept(rank: int) -> list[Any]:
    """Windows between which gradients are set to zero rather than taken away."""
    module = Mixed((torch.float64, torch.float64))
    reducer, found = GradientReducer(module.parameters()), []
    for used in (range(2), range(1, 2) if rank else range(2)):
        module.zero_grad(set_to_none=False)
        reducer.begin()
        module.loss(1.0, used).backward()
        reducer.finish()
        found.append([gradient.unique().tolist() for gradient in gradients(module) if gradient is not None])
    return found


def test_gradients_that_are_set_to_zero_between_windows() -> None:
    assert in_group(kept) == [[[[2], [4]], [[1], [4]]]] * 2


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


DTYPES = [(torch.bfloat16,) * 2, (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64,) * 2]


def test_the_weight_is_exact_whatever_the_dtype_of_gradients() -> None:
    """Also where bfloat16 would make 557 from 257 and 300 out to be 556, and whatever it was before."""
    expected = [([], total, [[3], [of_both]]) for of_both in (6, 2) for _, total in WEIGHTS]
    for dtypes, answers in zip(DTYPES, cases_in_group(weights, [[dtypes] for dtypes in DTYPES]), strict=True):
        assert answers == [expected] * 2, dtypes


def nothing_to_learn(rank: int) -> float:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    reducer = GradientReducer([frozen])
    reducer.begin(rank + 2)
    reducer.finish()
    return float(reducer.total())


def test_a_module_that_learns_nothing() -> None:
    assert in_group(nothing_to_learn) == [5, 5]


# When they are exchanged


def of_a_backward(rank: int, megabytes: float, eager: bool) -> tuple[list[int], list[bool]]:
    """The exchanges before the backward, when it reaches the input, and at its end; and when the reducer is open."""
    module, features = network(), samples()[0].requires_grad_()
    reducer = GradientReducer(module.parameters(), megabytes)
    counts: list[int] = []
    is_open: list[bool] = []

    def note(*_: Any) -> None:
        counts.append(counted.call_count)
        is_open.append(reducer.is_open)

    with exchanges() as counted:
        features.register_hook(note)
        module(features).sum().backward()  # of an earlier part of the window
        note()
        reducer.begin(eager=eager)
        module(features).sum().backward()
        reducer.finish()
        note()
    return counts, is_open


def test_exchanges_begin_while_the_backward_runs() -> None:
    is_open = [False, False, True, False]
    eager, *at_the_end = cases_in_group(of_a_backward, [(ONE_EACH, True), (ONE_EACH, False), (LARGE, False)])
    for counts, eagerly_open in eager:
        assert counts[:2] == [0, 0]
        assert 4 <= counts[2] <= 6
        assert counts[3] == 6
        assert eagerly_open == is_open
    assert at_the_end == [[([0, 0, 0, 6], is_open)] * 2, [([0, 0, 0, 1], is_open)] * 2]


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


def in_their_own_memory(rank: int) -> None:
    """The means of gradients, weighed 1 and 3; the first ones are kept and not overwritten by the next exchange."""
    module, kept = network(), []
    reducer = GradientReducer(module.parameters())
    for window in samples():
        of_parts = []
        for part in (window[:2], window[2:4]):
            module.zero_grad()
            module(part).sum().backward()
            of_parts.append(gradients(module))
        expected = [one / 4 + other * 3 / 4 for one, other in zip(*of_parts, strict=True)]
        module.zero_grad()
        module(window[2 * rank : 2 * rank + 2]).sum().backward()
        reducer.begin(eager=False, factor=1 + 2 * rank)
        reducer.finish(1 / 4)
        kept.append((expected, [p.grad for p in module.parameters()]))
    for expected, actual in kept:
        assert_equal(expected, actual, 1e-12)


def test_gradients_in_their_own_memory_are_weighted_means() -> None:
    in_group(in_their_own_memory)


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


def twice(rank: int, eager: bool) -> tuple[bool, list[Any]]:
    """Two backwards in one window, of which nobody was told; then one."""
    module, late = Mixed((torch.float64, torch.float64)), False
    reducer, found = GradientReducer(module.parameters(), LARGE), []
    for backwards in (2, 1):
        module.zero_grad()
        reducer.begin(eager=eager)
        for _ in range(backwards):
            try:
                module.loss(rank + 1).backward()
            except StepError:
                late = True
        reducer.finish()
        found.append([gradient.unique().tolist() for gradient in gradients(module) if gradient is not None])
    return late, found


def test_a_second_backward_in_a_window_is_refused_where_exchanges_have_begun() -> None:
    at_the_end, eager = cases_in_group(twice, [[False], [True]])
    assert at_the_end == [(False, [[[6], [12]], [[3], [6]]])] * 2
    for late, found in eager:
        assert late
        assert found[1] == [[3], [6]]  # the next window is not the worse for it


def closed(rank: int) -> tuple[int, bool, list[Any]]:
    module = Mixed((torch.float64, torch.bfloat16))
    first = GradientReducer(module.parameters(), ONE_EACH)
    first.begin()
    first.close()
    with exchanges() as counted:
        module.loss(rank + 1).backward()
    alive = weakref.ref(first)
    del first
    module.zero_grad()
    second = GradientReducer(module.parameters(), ONE_EACH)
    second.begin()
    module.loss(rank + 1).backward()
    second.finish()
    sums = [gradient.unique().tolist() for gradient in gradients(module) if gradient is not None]
    return counted.call_count, alive() is None, sums


def test_a_closed_reducer_lets_go() -> None:
    assert in_group(closed) == [(0, True, [[3], [6]])] * 2
