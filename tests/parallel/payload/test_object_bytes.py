"""Objects and errors as bytes: all dtypes, hooks, errors that stay as they are, errors that cannot travel."""

import pickle
import threading

import pytest
import torch
from torch import nn

from equipoise.parallel.payload.object_bytes import dumps, loads, pickle_error


def test_a_parameter_keeps_its_hooks() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda gradient: 3 * gradient)
    read = loads(dumps(parameter))
    read.sum().backward()
    assert read.grad.tolist() == [3, 3]


def test_an_error_travels_without_its_cause_and_keeps_it_here() -> None:
    with pytest.raises(ValueError, match="no number") as caught:
        raise ValueError("no number") from KeyError(threading.Lock())
    error = caught.value
    content = pickle_error(error)
    assert content is not None
    read = pickle.loads(content)
    assert (type(read), read.args) == (ValueError, ("no number",))
    assert (read.__cause__, read.__context__, read.__traceback__) == (None, None, None)
    assert isinstance(error.__cause__, KeyError)
    assert error.__traceback__ is not None
