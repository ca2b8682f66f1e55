"""Options that go together with a device mesh, and those that stay out with a reason."""

import warnings
from typing import Any

import pytest
import torch

from equipoise import ConfigurationError, OOMRecovery
from tests.extensions.fsdp.mesh_modules import Cut
from tests.extensions.fsdp.programs import Net, assert_close, fit, fsdp, in_processes, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Compiled blocks: ")]

# Options of the trainer, and the largest difference of weights of about 1 after five steps of at most 0.01 each.
OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "computed again": ({"activation_checkpointing": ["blocks.*"]}, 1e-12),
    "compiled": ({"compile": True}, 1e-12),
    "float32": ({"precision": "32-true", "gradient_clip_val": 0.1}, 1e-5),
    "float16": ({"precision": "16-mixed"}, 5e-3),
    "bfloat16": ({"precision": "bf16-mixed"}, 5e-2),
}


def train(kind: Any, name: str, *strategy: Any) -> dict[str, torch.Tensor]:
    options = dict(OPTIONS[name][0])
    if not strategy:
        # The eager step is the reference.
        options.pop("compile", None)
    return weights_of(fit(kind, *strategy, batch_size=12, max_epochs=1, **options)[0])


def outcomes() -> list[Any]:
    """Return weights by case, what is refused, and warnings; called in every process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {name: train(Cut, name, fsdp(tensor=2), 2) for name in OPTIONS}
    with pytest.raises(ConfigurationError) as refused:
        fit(Cut, fsdp(tensor=2), 2, callbacks=[OOMRecovery()])
    return [found, str(refused.value), [str(warning.message) for warning in caught]]


def test_options_that_go_together() -> None:
    found, refusal, messages = in_processes(2, outcomes)
    for name, weights in found.items():
        assert_close(train(Net, name), weights, OPTIONS[name][1])
    assert "one cannot do its step again alone" in refusal
    assert not [message for message in messages if "were not compared" in message]
    (eager,) = [message for message in messages if message.startswith("Compiled blocks")]
    assert "stays eager, because there is a hook on its submodule" in eager
