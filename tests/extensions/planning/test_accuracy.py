"""Predicted peaks against those of real steps, as the ledger records them."""

import random

import pytest

from equipoise.extensions.planning.description.settings import StepSettings
from equipoise.extensions.planning.tracing.tracer import trace_step
from tests.extensions.planning.steps import MODELS, example_of, module_of, peak_of, recorded_really

# The casts of autocast's cache live a little longer in one of the two.
TOLERANCE = 0.005


def case(name: str, optimizer: str = "adam", **settings: object) -> tuple[str, str, StepSettings]:
    return name, optimizer, StepSettings(**settings)  # type: ignore[arg-type]


CASES = [
    *(case(name) for name in MODELS),
    case("perceptron", "sgd"),
    case("perceptron", "rmsprop", precision="64-true"),
    case("convolutions", "sgd", precision="bf16-mixed"),
    case("transformer", precision="bf16-mixed", accumulate_grad_batches=3),
    case("transformer", precision="bf16-true"),
    case("transformer", activation_checkpointing=("net.encoder.layers.*",)),
    case("convolutions", accumulate_grad_batches=2),
]


def names_of(value: object) -> str:
    if isinstance(value, StepSettings):
        return f"{value.precision}-{value.accumulate_grad_batches}-{len(value.activation_checkpointing)}"
    return str(value)


@pytest.mark.quick_cases(3)
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("name", "optimizer", "settings"), CASES, ids=names_of)
def test_peaks_of_real_steps_are_predicted(name: str, optimizer: str, settings: StepSettings) -> None:
    found = trace_step(lambda: module_of(name, optimizer), example_of(name), settings)
    assert found.method == "traced"
    assert found.notes == []
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    for batch_size in (1, random.Random(seed).randrange(3, 60)):
        if name == "convolutions" and batch_size == 1:
            # Statistics over one sample of one pixel would be refused.
            batch_size = 2
        recorded = recorded_really(module_of(name, optimizer), example_of(name), batch_size, settings)
        predicted = found.peak(batch_size)
        assert predicted.nbytes == pytest.approx(peak_of(recorded), rel=TOLERANCE), batch_size
        assert sum(predicted.parts.values()) == pytest.approx(predicted.nbytes, abs=10)


@pytest.mark.thorough
def test_the_largest_batch_is_right_to_the_sample() -> None:
    """The memory of this step grows with the square of the batch."""
    settings = StepSettings()
    found = trace_step(lambda: module_of("pairs"), example_of("pairs"), settings)
    limit = 300_000
    largest = found.largest_batch(limit)
    for batch_size, fits in {largest: True, largest + 1: False}.items():
        recorded = recorded_really(module_of("pairs"), example_of("pairs"), batch_size, settings)
        assert (peak_of(recorded) <= limit) is fits
    assert found.largest_batch(1000) == 0
