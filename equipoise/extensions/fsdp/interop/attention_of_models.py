"""The attention of models of transformers: the setting that names it, which no public attribute shows."""

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["OtherAttention", "models_of_transformers"]


def models_of_transformers(module: nn.Module) -> Iterator[Any]:
    """Yield the models of transformers in a module, outer ones first, without importing it.

    Args:
        module: The module.
    """
    # The package itself would import this file, and many others, to answer; without it there is no such model.
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return
    for part in module.modules():
        if isinstance(part, modeling.PreTrainedModel):
            yield part


class OtherAttention:
    """Another attention of the models of transformers in a module, for the time of `with` blocks.

    A setting that stayed would come into checkpoints, which are read where no such attention is registered.

    Args:
        module: The module.
        name: The name under which the attention is registered in `transformers.AttentionInterface`.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        before: dict[int, tuple[Any, Any]] = {}
        for model in models_of_transformers(module):
            before[id(model.config)] = (model.config, model.config._attn_implementation)
        # Models that cannot change it keep their own.
        for model in models_of_transformers(module):
            model.set_attn_implementation(name)
        self._changes = [(one, former, one._attn_implementation) for one, former in before.values()]
        self.__exit__()

    def __enter__(self) -> None:
        for configuration, _, other in self._changes:
            configuration._attn_implementation = other

    def __exit__(self, *error: object) -> None:
        for configuration, former, _ in self._changes:
            configuration._attn_implementation = former
