"""Captured steps compute on a GPU what eager ones compute, to the bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.extensions.compiled.interop.compiling import why_not_compiled
from equipoise.extensions.compiled.interop.features import CAPTURE
from tests.gpu.runs import GPU, Classifier, Noisy, fit, weights

# A warning, which is an error here, would say that a step stays eager.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.skipif(why_not_compiled(CAPTURE) is not None, reason="torch cannot trace a step"),
]

SIZES = [8] * 8 + [5]


class Returning(Noisy):
    """Keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch["features"])
        loss = nn.functional.cross_entropy(logits, batch["label"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs["logits"])


OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "32-true"},
    "bfloat16": {"precision": "bf16-mixed"},
    "float16": {"precision": "16-mixed"},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.1},
    "pinned": {"pinned": True, "prefetch": True},
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_equal_to_eager_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(1)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    results = []
    for capture in (False, True):
        torch.cuda.manual_seed(5)
        module, gradients, trainer = fit(Returning, sizes=SIZES, capture=capture, **OPTIONS[name])
        values = [*weights(module), *[buffer.cpu() for buffer in module.buffers()]]
        outputs = [tensor.cpu() for tensor in module.outputs]
        results.append([values, gradients, outputs, dict(trainer.callback_metrics), torch.cuda.get_rng_state(GPU)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert len(replays) >= 11


def test_memory_is_free_after_a_run() -> None:
    """But for a workspace of cuBLAS, which the process has once for all captures."""

    def allocated() -> int:
        module, _, _ = fit(Classifier, sizes=SIZES, capture=True)
        module.zero_grad()
        module.cpu()
        del module
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(GPU)

    before = allocated()
    assert allocated() <= before + (1 << 20)


class Reading(Classifier):
    """Reads its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + loss.item())


class Selecting(Classifier):
    """Waits inside an operation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + batch["features"][batch["features"] > 0].mean()


@pytest.mark.parametrize("make", [Reading, Selecting])
def test_steps_that_wait_stay_eager(make: type[Classifier]) -> None:
    """Nothing is captured, so nothing is left in disorder: the next run draws random numbers, and is captured."""
    eager = weights(fit(make, sizes=SIZES)[0])
    with pytest.warns(UserWarning, match="Captured steps: the training step stays eager"):
        captured = weights(fit(make, sizes=SIZES, capture=True)[0])
    for one, other in zip(captured, eager, strict=True):
        assert torch.equal(one, other)
    fit(Noisy, sizes=SIZES, capture=True)
