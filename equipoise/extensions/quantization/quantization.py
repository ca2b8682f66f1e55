"""Quantization: frozen weights of linear layers in few bits, for the training of adapters (QLoRA)."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.interop import is_fake, usual_tensors
from equipoise.extensions.quantization.adapter_checkpoints import AdapterCheckpoints, check_has_values, digest_of
from equipoise.extensions.quantization.chosen_layers import (
    check_names,
    check_strategy,
    linear_layers,
    read_elsewhere,
    replace,
    require,
)
from equipoise.extensions.quantization.formats import eight_bits, four_bits
from equipoise.extensions.quantization.quantized_linear import Quantize, QuantizedLinear, quantized_layers
from equipoise.formats import format_bytes

__all__ = ["Quantization"]

# The package of each kind.
_PACKAGES = {"nf4": "bitsandbytes", "fp4": "bitsandbytes", "int8": "torchao"}


class Quantization(AdapterCheckpoints):
    """Store the frozen weights of linear layers in few bits, while other weights, such as adapters, are trained.

    After `configure_model` each linear layer none of whose parameters is trained gets its weight in four or eight bits
    (QLoRA: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023). A step turns one weight at a time
    into floats, in the forward and again in the backward. The weights stay as they are to the bit. Checkpoints hold no
    frozen weights, as those of `AdapterCheckpoints`.

    The layers stay quantised after the run. Tied weights, layers that derive from `nn.Linear`, and those of
    `nn.TransformerEncoderLayer` are left whole: others read them without calling the layer. So are peft's adapters, if
    they are frozen.

    Args:
        kind: "nf4" or "fp4": four bits, by bitsandbytes. "int8": eight bits and a scale for each row, by torchao.
            Default: "nf4".
        layers: Names of layers or of submodules that contain them, or patterns, in which * stands for anything.
            Default: None, all frozen linear layers.
        exclude: Names or patterns of layers that are left whole. Default: none.
        blocksize: The number of values that share a scale, of four bits. Default: 64.
        compress_statistics: Whether these scales have eight bits each instead of 32. Default: True.

    Attributes:
        quantized: The names of the quantised layers, after the module was configured.

    Raises:
        ConfigurationError: If there is no such kind, a package is missing, nothing can be quantised, or the strategy or
            a device cannot compute with such layers.

    Example:
        >>> from equipoise import Quantization, Trainer
        >>> Trainer(callbacks=[Quantization("nf4")]).fit(module)  # doctest: +SKIP
    """

    def __init__(
        self,
        kind: Literal["nf4", "fp4", "int8"] = "nf4",
        *,
        layers: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        blocksize: int = 64,
        compress_statistics: bool = True,
    ) -> None:
        super().__init__()
        if kind not in _PACKAGES:
            raise ConfigurationError(f"kind is one of {', '.join(map(repr, _PACKAGES))}, not {kind!r}.")
        check_names("Quantization", layers=layers, exclude=exclude)
        require(_PACKAGES[kind], f"Quantization({kind!r})")
        self.kind = kind
        self.layers = layers
        self.exclude = exclude
        self.blocksize = blocksize
        self.compress_statistics = compress_statistics
        self.quantized: tuple[str, ...] = ()

    def on_configure_model_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Quantise the layers that are not quantised yet; see `Callback.on_configure_model_end`."""
        strategy = trainer.strategy
        check_strategy("Quantization", strategy)
        chosen = self._chosen(pl_module)
        self._try(strategy.devices)
        nbytes = sum(layer.weight.nbytes for layer in chosen.values())
        count = len(chosen)
        # One at a time, so that the whole weights are never on the device together.
        while chosen:
            _, layer = chosen.popitem()
            self._exchange(pl_module, layer, strategy.root_device, trainer.precision)
        is_planned = any(map(is_fake, pl_module.parameters()))
        if count and not is_planned:
            rank_zero_info(f"Quantised {count} linear layers of {format_bytes(nbytes)} to {self.kind}.")
        self.quantized = tuple(quantized_layers(pl_module))
        super().on_configure_model_end(trainer, pl_module)

    def _chosen(self, module: nn.Module) -> dict[str, nn.Linear]:
        """Return the layers to be quantised; none if an earlier run has quantised them."""
        layers = linear_layers(module, self.layers, self.exclude, "Quantization")
        uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
        inside = read_elsewhere(module)
        chosen = {}
        for name, layer in layers.items():
            is_trained = any(parameter.requires_grad for parameter in layer.parameters())
            is_tied = uses[id(layer.weight)] > 1
            if not is_trained and not is_tied and layer not in inside:
                check_has_values(f"{name}.weight", layer.weight, "Quantization")
                chosen[name] = layer
        if not chosen and not quantized_layers(module):
            raise ConfigurationError(
                f"Quantization finds nothing to quantise: none of {len(layers)} linear layers is frozen and untied."
                " Freeze the base model, as `peft.get_peft_model` does, or by `requires_grad_(False)`. Other"
                " classes than nn.Linear, such as transformers' Conv1D, are not quantised."
            )
        return chosen

    def _exchange(self, module: nn.Module, layer: nn.Linear, device: torch.device, precision: Any) -> None:
        how = (self.kind, self.blocksize, self.compress_statistics)
        digest = f"{how} {digest_of(layer.weight, precision)}"
        quantized = QuantizedLinear(layer, self._quantize, device, digest)
        replace(module, lambda part: quantized if part is layer else None)

    @property
    def _quantize(self) -> Quantize:
        if self.kind == "int8":
            return eight_bits
        return partial(
            four_bits, kind=self.kind, blocksize=self.blocksize, compress_statistics=self.compress_statistics
        )

    def _try(self, devices: Sequence[torch.device]) -> None:
        for device in set(devices):
            try:
                # A plan has tensors without memory, with which everything computes.
                with usual_tensors():
                    layer = QuantizedLinear(nn.Linear(64, 16, device=device), self._quantize, device)
                    layer(torch.zeros(1, 64, device=device))
            except Exception as error:
                raise ConfigurationError(
                    f"Quantization({self.kind!r}): {device} cannot compute with such weights: {error}. Take another"
                    " kind or device, or leave it out."
                ) from error

    @staticmethod
    def dequantize(module: nn.Module) -> None:
        """Replace quantised layers by layers of torch with the same values, in the dtype of the first weight, in place.

        Adapters can be merged into such layers.

        Args:
            module: The module, after the run.

        Example:
            >>> Quantization.dequantize(module)  # doctest: +SKIP
            >>> whole = module.model.merge_and_unload()  # doctest: +SKIP
        """
        dtype = torch.float32
        for parameter in module.parameters():
            if parameter.is_floating_point():
                dtype = parameter.dtype
                break
        replace(module, lambda part: part.whole(dtype) if isinstance(part, QuantizedLinear) else None)
