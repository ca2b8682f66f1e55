"""Float8Training: products of linear layers in float8, in the forward and in the backward."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from equipoise.callbacks.callback import Callback
from equipoise.errors import ConfigurationError
from equipoise.extensions.common.interop import is_fake
from equipoise.extensions.quantization.chosen_layers import (
    check_names,
    check_strategy,
    keep_attributes,
    linear_layers,
    read_elsewhere,
    replace,
    require,
)
from equipoise.extensions.quantization.float8_gathering import GatheredInFloat8
from equipoise.precision import core_precision

__all__ = ["Float8Training"]

_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")

# The kernels need sizes that this number divides.
_DIVISOR = 16

# The first compute capability with products in float8.
_CAPABILITY = (8, 9)


class Float8Training(Callback):
    """Compute the products of linear layers in float8, by torchao.

    For the time of a run, each linear layer whose sizes are divisible by 16 rounds its input, its weight and the
    gradient of its output to float8 before it multiplies them (Micikevicius et al., "FP8 Formats for Deep Learning",
    2022). Weights, gradients and checkpoints keep their dtype and names. `precision="fp8"` stands for this callback
    with "bf16-mixed", "fp8-true" for that with "bf16-true"; both leave the options to one that is given.

    The numbers are others, and they depend on how a batch is split, since all of its values share a scale.

    Args:
        recipe: The part that has a scale of its own. "tensorwise": a tensor, quickest. "rowwise": a row, more exact.
            "rowwise_with_gw_hp": the same, with gradients of weights in the dtype of the input. Default: "tensorwise".
        layers: Names of layers or of submodules that contain them, or patterns, in which * stands for anything.
            Default: None, all linear layers.
        exclude: Names or patterns of layers that stay as they are, such as the output head. Default: none.
        fp8_all_gather: Gather weights in float8 under `fsdp`, which computes the same numbers; for recipe "tensorwise",
            and for steps that read no weight without calling its layer. Weights of several names, and those that torch
            or peft read themselves, are gathered as they are. Default: False.
        emulate: Round to float8 and multiply in float32, on any device; slow, for tests. Default: False.

    Raises:
        ConfigurationError: If there is no such recipe, torchao is missing, no layer fits, or a device cannot multiply
            in float8: that needs an NVIDIA GPU of compute capability 8.9 (Ada, Hopper).

    Example:
        >>> from equipoise import Float8Training, Trainer
        >>> Trainer(callbacks=[Float8Training(exclude=["*.lm_head"])], precision="fp8-true")  # doctest: +SKIP
    """

    def __init__(
        self,
        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
        *,
        layers: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        fp8_all_gather: bool = False,
        emulate: bool = False,
    ) -> None:
        if recipe not in _RECIPES:
            raise ConfigurationError(f"recipe is one of {', '.join(map(repr, _RECIPES))}, not {recipe!r}.")
        check_names("Float8Training", layers=layers, exclude=exclude)
        require("torchao", "Float8Training")
        self.recipe = recipe
        self.layers = layers
        self.exclude = exclude
        self.fp8_all_gather = fp8_all_gather
        self.emulate = emulate
        # The layers as they were, by the identity of those that compute in float8.
        self._originals: dict[int, nn.Linear] = {}

    def on_configure_model_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Exchange the layers; see `Callback.on_configure_model_end`."""
        check_strategy("Float8Training", trainer.strategy)
        self._check_precision(trainer.strategy.root_device, core_precision(trainer.precision))
        # A plan is made on a machine of any kind.
        is_planned = any(map(is_fake, pl_module.parameters()))
        if not self.emulate and not is_planned:
            _check_devices(trainer.strategy.devices)
        layers = linear_layers(pl_module, self.layers, self.exclude, "Float8Training")
        chosen = {}
        for name, layer in layers.items():
            if layer.in_features % _DIVISOR == 0 and layer.out_features % _DIVISOR == 0:
                chosen[name] = layer
        if not chosen:
            raise ConfigurationError(
                f"Float8Training: of {len(layers)} linear layers none has sizes that {_DIVISOR} divides, as products in"
                " float8 need them. Leave it out."
            )
        self._exchange(pl_module, chosen)
        if self.fp8_all_gather:
            self._gather_in_float8(pl_module, trainer.strategy)
        if not is_planned:
            rank_zero_info(f"{len(chosen)} of {len(layers)} linear layers compute in float8.")

    def _check_precision(self, device: torch.device, precision: str) -> None:
        """Refuse what the library cannot compute."""
        is_rowwise = self.recipe != "tensorwise"
        if is_rowwise and not self.emulate and "bf16" not in precision:
            raise ConfigurationError(
                f"Float8Training({self.recipe!r}) computes in bfloat16 beside float8, not in precision={precision!r}."
                " Take 'bf16-true' or 'bf16-mixed', or recipe='tensorwise'."
            )
        if self.recipe == "rowwise_with_gw_hp" and device.type == "cpu" and "mixed" in precision:
            raise ConfigurationError(
                f"Float8Training({self.recipe!r}) does not go with precision={precision!r} on a CPU. Take 'bf16-true'."
            )

    def _exchange(self, module: nn.Module, chosen: dict[str, nn.Linear]) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        from equipoise.extensions.quantization.float8_linear import Float8Linear

        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(self.recipe), emulate=self.emulate)
        converted: dict[nn.Module, nn.Module] = {}
        for layer in chosen.values():
            # The function exchanges the children of a module, one that has two names for two layers.
            parent = nn.Sequential(layer)
            convert_to_float8_training(parent, config=config)
            parent[0].__class__ = Float8Linear
            keep_attributes(layer, parent[0])
            converted[layer] = parent[0]
            self._originals[id(parent[0])] = layer
        replace(module, converted.get)

    def _gather_in_float8(self, module: nn.Module, strategy: Any) -> None:
        """Let processes gather the weights in float8, or refuse that."""
        reason: str | None = f"strategy={strategy.name!r} gathers no weights"
        if self.recipe != "tensorwise":
            reason = f"the scales of recipe={self.recipe!r} are not those of whole weights"
        elif hasattr(strategy, "gather_weights_as"):
            reason = strategy.gather_weights_as(self._forms(module))
        if reason is not None:
            raise ConfigurationError(f"Float8Training(fp8_all_gather=True): {reason}. Leave it out.")

    def _forms(self, module: nn.Module) -> dict[nn.Module, Any]:
        """Return what gathers the weight of a layer in float8, for each layer that alone uses its weight."""
        uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
        inside = read_elsewhere(module)
        forms: dict[nn.Module, Any] = {}
        for part in module.modules():
            if id(part) in self._originals and part not in inside and uses[id(part.weight)] == 1:
                layer: Any = part
                dtype = layer.config.cast_config_weight.target_dtype
                forms[part] = partial(GatheredInFloat8, config=layer.linear_mm_config, dtype=dtype)
        return forms

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Put the layers back, which have the trained weights."""
        replace(pl_module, self._original_of)
        self._originals.clear()

    def _original_of(self, part: nn.Module) -> nn.Module | None:
        original = self._originals.get(id(part))
        if original is not None:
            for name, parameter in part.named_parameters(recurse=False):
                setattr(original, name, parameter)
            original.train(part.training)
        return original

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the layers back, and say what errors of torchao's tensors mean, which name no argument."""
        if self.fp8_all_gather and isinstance(exception, AssertionError | NotImplementedError):
            exception.add_note(
                "Float8Training(fp8_all_gather=True): only layers can read their gathered weights. If the step reads a"
                " weight itself, leave fp8_all_gather out, or name its layer in exclude."
            )
        self.teardown(trainer, pl_module, "fit")


def _check_devices(devices: Sequence[torch.device]) -> None:
    """Refuse devices that cannot multiply in float8."""
    for device in devices:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY:
            raise ConfigurationError(
                f"Float8Training needs GPUs of compute capability {'.'.join(map(str, _CAPABILITY))} or higher, such as"
                f" an L4 or an H100, which {device} is not. Leave it out, or set emulate=True for a test."
            )
