"""Attributes and containers are restored: names, values, their order, and the contents of the same objects."""

from collections import OrderedDict, deque

import torch
from torch import nn

from equipoise.interop.torch.modules import buffers_of
from equipoise.parallel.snapshot.attributes import Attributes, Containers


def test_names_values_and_their_order_are_restored() -> None:
    module = nn.BatchNorm1d(2)
    names, statistics = list(vars(module)), module.running_mean
    attributes, buffers = Attributes([module]), Attributes([module], buffers_of)
    attributes.mark()
    buffers.mark()
    assert attributes.first_change() is None
    module.eps = 1.0
    del module.momentum
    module.momentum = 0.2
    module.more = 1
    module.running_mean = torch.ones(2)
    assert attributes.first_change() == (module, "eps")
    assert buffers.first_change() == (module, "running_mean")
    attributes.restore()
    buffers.restore()
    assert list(vars(module)) == names
    assert (module.eps, module.momentum) == (1e-5, 0.1)
    assert module.running_mean is statistics
    assert list(module.state_dict())[2:4] == ["running_mean", "running_var"]
    attributes.restore()  # a second time
    assert attributes.first_change() is buffers.first_change() is None


def test_contents_are_restored_in_the_same_containers() -> None:
    module = nn.Sequential(nn.Identity())
    part = module[0]
    part.rows, part.names, part.seen, part.queue = [1], {"a": 1}, {1}, deque([1, 2], maxlen=2)
    part._private, part.ordered, part.absent = [1], OrderedDict(a=1), None
    kept = dict(vars(part))
    containers = Containers(module)
    containers.mark()
    for value in (part.rows, part._private):
        value.append(2)
    part.names.update(a=2, b=3)
    part.ordered.update(a=2)
    part.seen.clear()
    part.queue.append(3)
    part.rows = []
    containers.restore()
    assert kept["rows"] == [1]
    assert part.rows == []  # another object, which attributes restore
    assert (part.names, part.seen, part.queue) == ({"a": 1}, {1}, deque([1, 2]))
    assert (part._private, part.ordered) == ([1, 2], {"a": 2})
    assert part.queue is kept["queue"]
