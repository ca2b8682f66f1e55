"""Work with a module that leaves no trace: generators, modes, attributes, buffers, metrics."""

import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler, Subset, TensorDataset
from torchmetrics import MeanMetric

from equipoise.parallel.snapshot.generators import find_generators
from equipoise.parallel.snapshot.preserve_state import preserve_state
from tests.support.equality import assert_equal


class Holder(nn.Module):
    """Has everything that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(2), nn.Dropout()
        self.register_buffer("count", torch.zeros(()))
        with torch.inference_mode():
            self.register_buffer("table", torch.zeros(2))
        self.seen = MeanMetric()
        self.torchs = torch.Generator().manual_seed(1)
        self.pythons = random.Random(2)
        self.numpys = numpy.random.default_rng(3)
        self.legacy = numpy.random.RandomState(4)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.update(x)
        if x.is_inference():
            self.table += 1
        self.state, self.cache = x, x  # one that was there before, one that was not
        return self.drop(self.norm(x))


def drawn(module: Holder, generators: list[torch.Generator]) -> list[float]:
    """The next number of every generator."""
    own = [module.pythons.random(), float(module.numpys.random()), float(module.legacy.rand())]
    torchs = [None, module.torchs, *generators]
    return [
        random.random(),
        float(numpy.random.rand()),
        *own,
        *(float(torch.rand((), generator=generator)) for generator in torchs),
    ]


@pytest.mark.parametrize(("fails", "inference"), [(False, True), (True, False)])
def test_generators_modes_attributes_buffers_and_metrics_are_put_back(fails: bool, inference: bool) -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    data = TensorDataset(torch.rand(8, 2))
    data.generator = generators[2]
    sampler = RandomSampler(data, generator=generators[0])
    loader = DataLoader(Subset(data, range(8)), batch_size=4, sampler=sampler, generator=generators[1])

    def prepared() -> Holder:
        for seed, generator in enumerate(generators):
            generator.manual_seed(seed)
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(0)
        module = Holder()
        module.drop.eval()
        module(torch.ones(4, 2))
        return module

    untouched, module = drawn(prepared(), generators), prepared()
    state, before = module.state, {name: value.clone() for name, value in module.state_dict().items()}
    del module.cache

    error = pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext()
    with error, preserve_state(module, loader):
        module.train()
        with torch.inference_mode(inference):
            for (batch,) in loader:
                module(batch.clone())
        drawn(module, generators)
        module.norm.running_mean = torch.ones(2)
        if fails:
            raise RuntimeError("on purpose")
    assert [module.training, module.norm.training, module.drop.training] == [True, True, False]
    assert module.state is state
    assert not hasattr(module, "cache")
    assert_equal(before, dict(module.state_dict()))
    assert (float(module.seen.compute()), module.seen.update_count) == (1.0, 1)
    assert drawn(module, generators) == untouched
    module(torch.rand(4, 2, requires_grad=True)).sum().backward()  # nothing of inference mode is left in it


class Transform:
    """Draws from a generator of its own."""

    def __init__(self, kind: Any) -> None:
        self.generator = kind(7)

    def __call__(self, x: Tensor) -> Tensor:
        draw = getattr(self.generator, "random", None) or self.generator.rand
        return x + float(draw())


class Transformed(Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(torch.zeros(()))


class Composed:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Chosen:
    def __init__(self, one: Any) -> None:
        self.by_name = {"one": [one]}

    def __call__(self, x: Tensor) -> Tensor:
        return self.by_name["one"][0](x)


def scaled(transform: Any, x: Tensor) -> Tensor:
    return 2 * transform(x)


@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        (lambda transform: Transformed(Chosen(transform)), numpy.random.RandomState),
        (lambda transform: Transformed(transform.__call__), numpy.random.default_rng),
        (lambda transform: ConcatDataset([Subset(Transformed(Composed(transform)), range(4))]), random.Random),
    ],
    ids=["dictionary", "method", "concatenated"],
)
def test_generators_of_transforms_are_put_back(wrap: Any, kind: Any) -> None:
    loader, untouched = (DataLoader(wrap(Transform(kind)), batch_size=2) for _ in range(2))
    with preserve_state(nn.Identity(), loader):
        disturbed = list(loader)
    assert_equal([disturbed, list(untouched)], [after := list(loader), after])


def test_a_collate_function_and_data_that_refers_to_itself() -> None:
    data = Transformed(Transform(random.Random))
    data.itself = [data]
    mix = Transform(random.Random)
    loader = DataLoader(data, batch_size=3, collate_fn=partial(scaled, Composed(torch.stack, mix)))
    with preserve_state(nn.Identity(), loader):
        before = list(loader)
    assert_equal(before, list(loader))


def test_what_is_too_far_away_is_left_alone() -> None:
    """Data may be large: neither long lists are searched nor deep ones."""
    deep: Any = random.Random(1)
    for _ in range(7):
        deep = [deep]
    data = TensorDataset(torch.zeros(2))
    data.deep, data.long, data.system = deep, [random.Random(2)] * 65, random.SystemRandom()
    assert find_generators([data]) == []
    data.long.pop()
    assert find_generators([data]) == data.long[:1]
    assert len(find_generators([deep[0]])) == 1


def test_a_mode_with_consequences_is_taken_back_by_its_own_method() -> None:
    class Merging(nn.Linear):
        merged = False

        def train(self, mode: bool = True) -> "Merging":
            if mode == self.merged:
                self.weight.data *= 0.5 if mode else 2.0
                self.merged = not mode
            return super().train(mode)

    module = nn.Sequential(Merging(2, 2))
    weight = module[0].weight.detach().clone()
    with preserve_state(module):
        module.eval()
        assert module[0].merged
        assert torch.equal(module[0].weight, 2 * weight)
    assert not module[0].merged
    assert module[0].training
    assert torch.equal(module[0].weight, weight)


def test_a_scripted_module_gets_its_modes_back() -> None:
    # It depends on the version of torch which of them it is.
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        module = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    with preserve_state(module):
        module.eval()
    assert all(part.training for part in module.modules())
