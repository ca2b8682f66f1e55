"""AdapterCheckpoints: checkpoints without the frozen weights, which the base model has."""

import hashlib
from collections.abc import Collection, Set
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from equipoise.callbacks.callback import Callback
from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.extensions.common.interop import is_fake
from equipoise.extensions.quantization.chosen_layers import check_strategy
from equipoise.extensions.quantization.quantized_linear import QuantizedLinear
from equipoise.interop.lightning.classes import is_a
from equipoise.precision import core_precision

__all__ = ["AdapterCheckpoints", "check_has_values", "digest_of"]

# The dtypes to which a precision converts a module, so that digests are the same before and after.
_CONVERTED = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}

# Integers as long as an element, which is read by its bits.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class AdapterCheckpoints(Callback):
    """Leave the frozen weights out of checkpoints, such as the base model of LoRA; those of adapters remain.

    A run that continues builds the same base model again, as its `__init__` or `configure_model` loads it, and this
    callback checks that it is the same one. Weights that are trained at any time are in the checkpoint, and so are
    buffers, and weights that the run has loaded from a checkpoint. It is not for frozen weights that the program itself
    changes, such as a target network's mean of others. After the run the module is as without the callback.

    Attributes:
        left_out_of_checkpoints: The names of the frozen weights; see `Callback`.

    Raises:
        ConfigurationError: If no weight is frozen, one has no values yet, a callback averages all weights, or
            the base model was quantised by a library whose state torch does not load.
        CheckpointError: If a run continues with another base model.

    Example:
        >>> from equipoise import AdapterCheckpoints, Trainer
        >>> Trainer(callbacks=[AdapterCheckpoints()]).fit(module)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.left_out_of_checkpoints: Set[str] = frozenset()
        # What tells each frozen weight from others, by name.
        self._digests: dict[str, str] = {}

    @property
    def state_key(self) -> str:
        """The name of the state in checkpoints, that of derived classes as well: they read each other's."""
        return "AdapterCheckpoints"

    def on_configure_model_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note the frozen weights; see `Callback.on_configure_model_end`."""
        name = type(self).__name__
        check_strategy(name, trainer.strategy)
        for callback in trainer.callbacks:
            if is_a(callback, StochasticWeightAveraging, WeightAveraging):
                raise ConfigurationError(
                    f"{name} keeps frozen weights apart, where {type(callback).__name__} computes the mean of all"
                    " weights. Leave one out."
                )
        digests = {}
        for prefix, part in pl_module.named_modules(remove_duplicate=False):
            for parameter_name, parameter in part.named_parameters(prefix, recurse=False):
                if not parameter.requires_grad:
                    check_has_values(parameter_name, parameter, name)
                    digests[parameter_name] = _digest_in(part, parameter, trainer.precision)
        if not digests:
            raise ConfigurationError(f"{name}: no weight is frozen, so checkpoints hold all of them. Leave it out.")
        _check_entries(pl_module, digests, name)
        # Other processes get the weights of the main process.
        self._digests = trainer.strategy.processes.broadcast(digests)
        self.left_out_of_checkpoints = frozenset(self._digests)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Keep weights in checkpoints from now on that a callback for finetuning has thawed."""
        for name, parameter in pl_module.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                self.left_out_of_checkpoints -= {name}

    def state_dict(self) -> dict[str, Any]:
        """Return what tells the weights that are left out from others."""
        base = {}
        for name in sorted(self.left_out_of_checkpoints):
            base[name] = self._digests[name]
        return {"base": base} if base else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that a run continues with the base weights of the checkpoint.

        Args:
            state_dict: The result of `state_dict`.

        Raises:
            CheckpointError: If it does not.
        """
        base: dict[str, str] = state_dict["base"]
        for name, digest in base.items():
            if self._digests.get(name) != digest:
                raise CheckpointError(
                    f"The checkpoint was trained with another base model: {name} is frozen and not in it, and here it"
                    " has other values, is trained, or does not exist. Load the same base model, quantised in the same"
                    " way, with the same precision."
                )
        # The checkpoint holds all others.
        self.left_out_of_checkpoints = frozenset(base)


def check_has_values(name: str, weight: Tensor, callback: str) -> None:
    """Refuse a frozen weight that has no values.

    Args:
        name: Its name.
        weight: The weight.
        callback: The name of the callback that needs the values.

    Raises:
        ConfigurationError: If it is on the meta device.
    """
    if weight.is_meta:
        raise ConfigurationError(
            f"{callback}: {name} is frozen and on the meta device, so it has no values. Load the base model in"
            " `__init__` or `configure_model`."
        )


def _check_entries(module: nn.Module, frozen: Collection[str], callback: str) -> None:
    """Refuse frozen weights with further entries in the state, such as scales, which torch does not load."""
    for key in module.state_dict():
        name, _, _ = key.rpartition(".")
        while name and name not in frozen:
            name, _, _ = name.rpartition(".")
        if name:
            raise ConfigurationError(
                f"{callback}: the state of {name} has an entry {key!r}, which torch does not load, so that no run could"
                " continue. Load the base model as floats, and quantise it by callbacks=[Quantization()]."
            )


def _digest_in(part: nn.Module, parameter: nn.Parameter, precision: Any) -> str:
    if isinstance(part, QuantizedLinear) and parameter is not part.bias:
        return part.digest
    return digest_of(parameter, precision)


def digest_of(weight: Tensor, precision: Any) -> str:
    """Return a text that differs for other values; empty for a weight without memory, as in a plan.

    Args:
        weight: The weight.
        precision: The name of the run's precision, which may convert it.
    """
    if is_fake(weight):
        return ""
    values = weight.detach()
    if values.is_floating_point():
        values = values.to(_CONVERTED.get(core_precision(precision), values.dtype))
    # A view as integers needs a dimension.
    rows = values.reshape(1, -1)
    if values.ndim > 1:
        rows = values.flatten(1)
    integers = _INTEGERS.get(values.itemsize, torch.int64)
    rows = rows.contiguous()
    rows = rows.view(integers)
    parts = [rows]
    if len(rows) > 1:
        # A matrix is read on its device. The exclusive or of its rows does not show their order, and that of equal
        # ones is 0; so there is that of its columns, and the first row.
        of_rows = torch.hash_tensor(rows, dim=0)
        of_columns = torch.hash_tensor(rows, dim=1)
        parts = [of_rows, of_columns, rows[0]]
    digest = hashlib.sha256(f"{values.dtype} {values.shape}".encode())
    for part in parts:
        digest.update(part.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
