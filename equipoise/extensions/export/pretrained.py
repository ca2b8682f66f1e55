"""Models that save themselves in a layout of their own: those of transformers and peft, for `from_pretrained`."""

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.extensions.export.layout import converted
from equipoise.extensions.export.weights import open_weights
from equipoise.parallel.unfinished_files import set_permissions, umask

__all__ = ["find_models", "has_own_layout", "save_pretrained"]


def has_own_layout(module: nn.Module) -> bool:
    """Return True if a module has a method `save_pretrained`."""
    return callable(getattr(module, "save_pretrained", None))


def find_models(module: nn.Module) -> list[str]:
    """Return the names of the outermost submodules with a layout of their own; "" is the module itself."""
    found: list[str] = []
    for name, part in module.named_modules():
        is_inner = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if has_own_layout(part) and not is_inner:
            found.append(name)
    return found


def save_pretrained(module: Any, folder: Path, dtype: torch.dtype | None, most_bytes: int) -> None:
    """Write a model in its own layout.

    Args:
        module: The model.
        folder: The folder to write to.
        dtype: The type of floating-point weights. None: as they are.
        most_bytes: The largest size of a file.
    """
    options: dict[str, Any] = {}
    signature = inspect.signature(module.save_pretrained)
    if "max_shard_size" in signature.parameters:
        options["max_shard_size"] = most_bytes
    if dtype is not None:
        options["state_dict"] = _converted(module, dtype)
    module.save_pretrained(folder, **options)
    # safetensors writes files that their owner alone can read.
    for file in folder.rglob("*.safetensors"):
        set_permissions(str(file), 0o666 & ~umask())
    config = folder / "config.json"
    if dtype is not None and config.is_file():
        # The method writes the type of the module, in which `from_pretrained` would load the weights.
        text = config.read_text(encoding="utf-8")
        content = json.loads(text)
        content["dtype"] = str(dtype).removeprefix("torch.")
        text = json.dumps(content, indent=2, sort_keys=True)
        config.write_text(f"{text}\n", encoding="utf-8")


def _converted(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the state of a module in another dtype, in which tied weights are still one tensor."""
    with open_weights(module) as weights:
        state = weights.state()
        for name, value in state.items():
            if name not in weights.aliases and value.is_floating_point():
                state[name] = converted(name, value, dtype)
        for alias, name in weights.aliases.items():
            state[alias] = state[name]
        return state
