"""Every generator comes back to where it was, also by way of a file, and nothing is woken up to be looked at."""

import io
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from equipoise.errors import CheckpointError
from equipoise.parallel.snapshot.random_state import RandomState, capture, isolated
from tests.support.trainer_runs import refuses

# One draw of each kind. A normal number leaves a second one behind, in Python, numpy and torch alike.
DRAWS: dict[str, Callable[[], Any]] = {
    "torch.rand": lambda: torch.rand(3).tolist(),
    "torch.randn": lambda: torch.randn(1).tolist(),
    "torch.randn, vectorised": lambda: torch.randn(17).tolist(),
    "torch.randperm": lambda: torch.randperm(7).tolist(),
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.shuffle": lambda: random.sample(range(9), 9),
    "numpy.rand": lambda: np.random.rand(2).tolist(),
    "numpy.normal": lambda: np.random.normal(),
    "numpy.permutation": lambda: np.random.permutation(7).tolist(),
}
draws = st.lists(st.sampled_from(list(DRAWS)), max_size=8)


def draw(names: list[str]) -> list[Any]:
    return [DRAWS[name]() for name in names]


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)


def through_a_file(state: RandomState) -> RandomState:
    file = io.BytesIO()
    torch.save({"random": state.state_dict()}, file)
    file.seek(0)
    return RandomState.from_state_dict(torch.load(file, weights_only=True)["random"])


@settings(deadline=None)
@given(value=st.integers(0, 2**63 - 1), before=draws, between=draws, file=st.booleans())
@example(
    value=1, before=["random.gauss", "numpy.normal", "torch.randn"], between=[], file=True
)  # one of a pair is left
def test_restore_gives_the_same_streams(value: int, before: list[str], between: list[str], file: bool) -> None:
    everything = [*DRAWS, *DRAWS]
    seed(value)
    draw(before)
    state = capture()
    first = draw(everything)
    draw(between)
    if file:
        state = through_a_file(state)
    for _ in range(2):  # a state is not used up
        state.restore()
        assert draw(everything) == first
    assert draw(everything) != first


def test_another_bit_generator_of_numpy_is_restored() -> None:
    standard = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        np.random.normal()
        state = through_a_file(capture())
        first = draw(["numpy.normal", "numpy.rand", "numpy.permutation"])
        state.restore()
        assert draw(["numpy.normal", "numpy.rand", "numpy.permutation"]) == first
    finally:
        np.random.set_bit_generator(standard)


def test_a_state_that_lacks_a_generator_is_refused() -> None:
    state = capture().state_dict()
    del state["python"]
    for incomplete, words in ((state, "lacks python and holds cpu, cuda, mps, numpy"), ({}, "holds nothing")):
        refuses(lambda given=incomplete: RandomState.from_state_dict(given), words, error=CheckpointError)


# Isolation.


def test_isolated_restores_after_an_error() -> None:
    seed(0)
    first = draw(list(DRAWS))
    seed(0)
    with pytest.raises(KeyError), isolated():  # noqa: PT012
        draw(list(DRAWS))
        raise KeyError
    assert draw(list(DRAWS)) == first


# What is not in use.

UNTOUCHED = """
import sys
import torch
from equipoise.parallel.snapshot.random_state import RandomState, capture
assert "numpy.random" not in sys.modules, "torch imports it: this test shows nothing"
state = capture()
assert state.numpy is None and state.cuda == ()
state.restore()
assert "numpy.random" not in sys.modules and not torch.cuda.is_initialized()
RandomState.from_state_dict(torch.load(sys.argv[1], weights_only=True)).restore()
import numpy
print(numpy.random.normal())
"""


@pytest.mark.slow
def test_numpy_is_imported_only_to_restore_it(tmp_path: Path) -> None:
    np.random.normal()
    torch.save(capture().state_dict(), tmp_path / "state.pt")
    expected = np.random.normal()
    run = subprocess.run(
        [sys.executable, "-c", UNTOUCHED, str(tmp_path / "state.pt")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) == expected


def test_states_of_missing_cuda_devices_are_passed_over() -> None:
    state = capture().state_dict()
    first = draw(list(DRAWS))
    cuda = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RandomState.from_state_dict({**state, "cuda": cuda[torch.cuda.device_count() :]}).restore()
    assert draw(list(DRAWS)) == first


def test_the_generator_of_mps_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.tensor([0], dtype=torch.uint8)]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", states.append)
    state = through_a_file(capture())
    state.restore()
    assert [each.item() for each in states] == [0, 0]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    state.restore()  # on a machine without
    assert len(states) == 2
