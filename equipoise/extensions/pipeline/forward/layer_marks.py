"""Layers that may not change during a run, since stages were made of them or were sent to other processes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from torch import nn

from equipoise.errors import StepError
from equipoise.interop.torch.modules import buffers_of, children_of, hook_registries_of, parameters_of

__all__ = ["LayerMarks"]


class _Mark(NamedTuple):
    path: str
    module: nn.Module
    children: dict[str, nn.Module | None]
    contents: dict[str, Any]


class LayerMarks:
    """Layers as they are now.

    Args:
        layers: The layers by their names.
        contents: Whether their settings, hooks and tensors count, too. A setting is a number, text or truth value among
            the public attributes of a layer.
    """

    def __init__(self, layers: Mapping[str, nn.Module], *, contents: bool) -> None:
        self._with_contents = contents
        self._marks: list[_Mark] = []
        for name, layer in layers.items():
            for path, module in layer.named_modules(prefix=name):
                self._marks.append(_Mark(path, module, dict(children_of(module)), self._contents_of(module)))

    def check(self) -> None:
        """Raise a StepError if a layer was replaced, or has other contents."""
        for path, module, children, contents in self._marks:
            # Other layers may have been added: they are in no stage.
            if not children.items() <= children_of(module).items():
                raise StepError(
                    f"A layer of {path or 'the network'} was replaced or removed during the run, but under"
                    " strategy='pipeline' stages were made of the former layers. Do so before the run, for instance in"
                    " `configure_model`, or choose another strategy."
                )
            for kind, present in self._contents_of(module).items():
                if present != contents[kind]:
                    raise StepError(
                        f"A {kind} of the layer {path!r} was set during the run, but it lies in another process. Do so"
                        " before the run, or take engine='threads'."
                    )

    def _contents_of(self, module: nn.Module) -> dict[str, Any]:
        # The user's module is used for much else.
        if not self._with_contents or isinstance(module, LightningModule):
            return {}
        settings = {
            name: value
            for name, value in vars(module).items()
            if type(value) in (bool, int, float, str) and name != "training" and not name.startswith("_")
        }
        registries = hook_registries_of(module)
        hooks = [id(hook) for registry in registries for hook in registry.values() if _is_users(hook)]
        tensors = [*parameters_of(module).values(), *buffers_of(module).values()]
        return {"setting": settings, "hook": hooks, "tensor": list(map(id, tensors))}


def _is_users(hook: Any) -> bool:
    return callable(hook) and not str(getattr(hook, "__module__", "")).startswith("equipoise.")
