"""`equipoise export`: write the weights of a checkpoint as safetensors."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from lightning.pytorch import LightningModule

from equipoise.app.command import Reader, present, read_flags
from equipoise.app.config.checks import import_paths, locate
from equipoise.errors import ConfigurationError
from equipoise.extensions.export.export import Export, export_weights
from equipoise.extensions.export.pretrained import find_models
from equipoise.extensions.export.weights import chosen_state
from equipoise.interop.remote.paths import to_path
from equipoise.trainer.checkpointing.file_reading import check_is_file, read_checkpoint
from equipoise.trainer.checkpointing.module.names import with_present_names

__all__ = ["run_export"]

_TAKES = (
    "equipoise export takes CKPT OUT, --dtype=NAME, --max-shard-size=SIZE, --module=CLASS, --overwrite, --prefix=NAME"
    " and --weights=averaged|trained"
)

# Names that are listed.
_MOST_NAMES = 6


def run_export(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Run the command.

    Args:
        arguments: The checkpoint, the file or folder to write, and flags: see `export_weights`. `--module` names the
            class of the `LightningModule`, of which a model of transformers or peft is exported in its own layout.
        folders: None.

    Raises:
        ConfigurationError: If an argument is wrong.
        CheckpointError: See `export_weights`.
    """
    # 1. The arguments.
    paths, flags = read_flags(arguments, _READERS, _TAKES)
    if len(paths) != 2:
        raise ConfigurationError(f"{_TAKES}; it was given {' '.join(paths) or 'no path'}.")
    checkpoint, out = paths
    options: dict[str, Any] = {}
    for name, value in flags.items():
        options[name.strip("-").replace("-", "_")] = value

    # 2. The weights alone, or a model with its configuration.
    class_path = options.pop("module", None)
    if class_path is None:
        result = export_weights(checkpoint, out, **options)
    else:
        choice = options.pop("weights", None)
        # The class may lie in the present folder, beside the configurations.
        with import_paths([Path("conf").resolve()]):
            module = _load(class_path, checkpoint, choice)
        options.setdefault("prefix", _only_model(module))
        result = export_weights(module, out, **options)
    _print(result)


def _text(name: str, text: str | None) -> str:
    if not text:
        raise ConfigurationError(f"{name} takes a value, as in {name}=VALUE.")
    return text


_READERS: dict[str, Reader] = {
    "--dtype": _text,
    "--max-shard-size": _text,
    "--module": _text,
    "--overwrite": present,
    "--prefix": _text,
    "--weights": _text,
}


def _load(class_path: str, checkpoint: str, choice: str | None) -> LightningModule:
    """Return the module of a checkpoint, made from its class and its hyperparameters."""
    kind: Any = locate(class_path, "--module")
    if not isinstance(kind, type) or not issubclass(kind, LightningModule):
        raise ConfigurationError(f"--module must name a LightningModule, not {class_path}.")
    place = to_path(checkpoint)
    check_is_file(place)
    if os.path.isdir(checkpoint):
        raise ConfigurationError("--module needs a checkpoint that is one file: merge_shards(CKPT, FILE) makes it.")
    content = read_checkpoint(place)
    content["state_dict"] = chosen_state(content, choice)
    try:
        module: LightningModule = _made(kind, checkpoint)
        # It has loaded them in the dtypes of a new module.
        module.on_load_checkpoint(content)
        state = with_present_names(content["state_dict"], module.state_dict())
        # Checkpoints of adapters leave out frozen weights, which the module has since it was made.
        parameters = module.named_parameters(remove_duplicate=False)
        frozen = {name: value for name, value in parameters if not value.requires_grad}
        module.load_state_dict({**frozen, **state}, strict=module.strict_loading, assign=True)
    except (UnpicklingError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"{class_path} cannot be made from the hyperparameters of {checkpoint!r}: {reason} Make the module in a"
            " program, and call export_weights(module.model, OUT)."
        ) from error
    return module


def _made(kind: Any, checkpoint: str) -> Any:
    options = {"map_location": "cpu", "weights_only": True}
    try:
        with warnings.catch_warnings():
            # Whether all weights are there is checked afterwards.
            warnings.filterwarnings("ignore", "Found keys that are")
            return kind.load_from_checkpoint(checkpoint, strict=False, **options)
    except ValueError:
        # The class insists on its own choice, by `strict_loading`.
        return kind.load_from_checkpoint(checkpoint, **options)


def _only_model(module: LightningModule) -> str:
    """Return the name of the attribute with the model; "" if there is none."""
    models = find_models(module)
    if len(models) > 1:
        raise ConfigurationError(
            f"{type(module).__name__} holds several models: {', '.join(models)}. Choose one by --prefix=NAME."
        )
    return "".join(models)


def _print(result: Export) -> None:
    for file in result.files:
        print(f"wrote {file}")
    names = result.left_out
    if not names:
        return
    listed = ", ".join(names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        listed += " ..."
    print(f"left out {len(names)} outside of the prefix: {listed}")
