"""Training modes of submodules are noted and set each by itself."""

import pytest
from torch import nn

from equipoise.extensions.pipeline.graph.training_modes import modes_of, restored_modes, set_modes


class Frozen(nn.Linear):
    """Stays in evaluation mode, whatever `train` is called with."""

    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


def test_modes_are_set_without_calling_train() -> None:
    module = nn.Sequential(Frozen(2, 2), nn.Dropout()).train()
    modes = modes_of(module)
    assert modes == [True, False, True]
    module.eval()
    set_modes(module, modes)
    assert modes_of(module) == modes


def test_modes_of_another_module_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        set_modes(nn.Linear(2, 2), [True, False])


def test_modes_are_restored_beside_new_submodules() -> None:
    module = nn.Sequential(Frozen(2, 2), nn.Dropout()).train()
    with restored_modes(module):
        module.eval()
        module.append(nn.Dropout().eval())
    assert modes_of(module) == [True, False, True, False]
