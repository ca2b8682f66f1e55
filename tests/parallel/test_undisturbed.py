"""Work with a module that leaves no trace: generators, modes, attributes, buffers, metrics."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset
from torchmetrics import MeanMetric

from equipoise.parallel.undisturbed import undisturbed


class Holder(nn.Module):
    """Has everything that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(2), nn.Dropout()
        self.register_buffer("count", torch.zeros(()))
        self.seen = MeanMetric()
        self.torchs = torch.Generator().manual_seed(1)
        self.pythons = random.Random(2)
        self.numpys = numpy.random.default_rng(3)
        self.legacy = numpy.random.RandomState(4)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.update(x)
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


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_everything_is_put_back(fails: bool, inference: bool) -> None:
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

    def disturb() -> None:
        with undisturbed(module, loader):
            module.train()
            with torch.inference_mode(inference):
                for (batch,) in loader:
                    module(batch)
            drawn(module, generators)
            module.norm.running_mean = torch.ones(2)
            if fails:
                raise RuntimeError("on purpose")

    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            disturb()
    else:
        disturb()
    assert [module.training, module.norm.training, module.drop.training] == [True, True, False]
    assert module.state is state
    assert not hasattr(module, "cache")
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert (float(module.seen.compute()), module.seen.update_count) == (1.0, 1)
    assert drawn(module, generators) == untouched
    module(torch.rand(4, 2, requires_grad=True)).sum().backward()  # nothing of inference mode is left in it


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
    with undisturbed(module):
        module.eval()
        assert module[0].merged
        assert torch.equal(module[0].weight, 2 * weight)
    assert not module[0].merged
    assert module[0].training
    assert torch.equal(module[0].weight, weight)


def test_a_scripted_module_gets_its_modes_back() -> None:
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        module = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    with undisturbed(module):
        module.eval()
    assert all(part.training for part in module.modules())
