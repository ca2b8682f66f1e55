"""The measured memory of calls: weights are no activations, whether parameters or buffers, and wherever they lie."""

import pytest
import torch

from tests.extensions.pipeline.planning.measured_weights import Assertive, Mixing, check_weights


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("kind", [Mixing, Assertive])
def test_weights_are_no_activations(kind: type[Mixing], is_trained: bool) -> None:
    check_weights(kind, is_trained, torch.device("cpu"))
