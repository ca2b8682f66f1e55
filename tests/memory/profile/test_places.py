"""Devices of one name: which of them a tensor belongs to, against sizes that are known to the byte."""

import pytest
import torch
from torch import nn

from equipoise.memory.profile.ledger import Ledger
from equipoise.memory.profile.places import DevicePlaces, names_of_devices
from equipoise.parallel.device_work import computing_on, observe_devices

WIDTH = 64
WEIGHT = WIDTH * WIDTH * 4
ROWS = 32 * WIDTH * 4
NAMES = ["cpu (0)", "cpu (1)"]


@pytest.fixture
def places() -> DevicePlaces:
    places = DevicePlaces(NAMES, root=0)
    observe_devices(places)
    yield places
    observe_devices(None)


def test_memory_of_forward_backward_and_step_lies_with_its_device(places: DevicePlaces) -> None:
    """Two layers, each of which computes on a device: outputs, gradients and states lie with it."""
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    optimizer = torch.optim.Adam(layers.parameters(), foreach=True)
    ledger = Ledger(layers, [optimizer], places)
    ledger.start()
    ledger.move(layers[1].weight, NAMES[1])
    assert ledger.devices() == NAMES[:1]
    rows = torch.ones(32, WIDTH)

    # 1. The forward: the weight of each device, and the output of the second; the first has the rows and its own.
    with computing_on(0):
        hidden = layers[0](rows)
    with computing_on(1):
        output = layers[1](hidden)
        ledger.forget_peaks()
    assert ledger.peak(NAMES[1]).nbytes == WEIGHT + ROWS
    loss = output.sum()

    # 2. The backward: each gradient lies with its weight, although the same thread computes both.
    ledger.begin("backward")
    loss.backward()
    del hidden, output, loss
    ledger.begin("optimizer step")
    ledger.forget_peaks()
    assert ledger.peak(NAMES[1]).totals() == {"parameter": WEIGHT, "gradient": WEIGHT}

    # 3. The states, which the optimiser creates from lists of parameters.
    places.begin_backward()
    optimizer.step()
    optimizer.zero_grad()
    ledger.begin("forward")
    ledger.forget_peaks()
    for name in NAMES:
        assert ledger.peak(name).totals()["optimizer state"] >= 2 * WEIGHT
    ledger.stop()


def test_names_of_devices_are_numbered_where_one_is_given_twice() -> None:
    assert names_of_devices([torch.device("cpu")]) == ["cpu"]
    assert names_of_devices(["cuda:0", "cpu", "cuda:0"]) == ["cuda:0 (0)", "cpu", "cuda:0 (2)"]
