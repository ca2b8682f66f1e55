"""Layers that may not change during a run, since stages were made of them or were sent to other processes."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from equipoise.errors import StepError
from equipoise.interop.torch.modules import buffers_of, children_of, hook_registries_of, parameters_of

__all__ = ["LayerMarks"]


class LayerMarks:
    """Layers as they are now.

    Args:
        layers: The layers by their names.
        contents: Whether their settings, hooks and tensors count, too. A setting is a number, text or truth value among
            the public attributes of a layer.
    """

    def __init__(self, layers: Mapping[str, nn.Module], *, contents: bool) -> None:
        self._contents = contents
        self._noted = []
        for name, layer in layers.items():
            for path, module in layer.named_modules(prefix=name):
                self._noted.append((path, module, dict(children_of(module)), self._settings_of(module)))

    def check(self) -> None:
        """Raise a StepError if a layer was replaced, or has other contents."""
        for path, module, children, settings in self._noted:
            if not children.items() <= children_of(module).items():
                raise StepError(
                    f"A layer of {path or 'the network'} was replaced or removed during the run, but under"
                    " strategy='pipeline' stages were made of the former layers. Do so before the run, for instance in"
                    " `configure_model`, or choose another strategy."
                )
            if settings != self._settings_of(module):
                raise StepError(
                    f"A setting, a hook or a tensor of the layer {path!r} was set during the run, but it lies in"
                    " another process. Do so before the run, or take engine='threads'."
                )

    def _settings_of(self, module: nn.Module) -> Any:
        # The user's module is used for much else.
        if not self._contents or isinstance(module, LightningModule):
            return None
        settings = {
            name: value
            for name, value in vars(module).items()
            if type(value) in (bool, int, float, str) and name != "training" and not name.startswith("_")
        }
        hooks = [id(hook) for kind in hook_registries_of(module) for hook in kind.values() if _is_users(hook)]
        tensors = [*parameters_of(module).values(), *buffers_of(module).values()]
        return settings, hooks, list(map(id, tensors))


def _is_users(hook: Any) -> bool:
    return callable(hook) and not str(getattr(hook, "__module__", "")).startswith("equipoise.")
