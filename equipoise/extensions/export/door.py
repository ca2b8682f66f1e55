"""Files of safetensors for the Trainer: `save_checkpoint("x.safetensors")` and `ckpt_path="x.safetensors"`."""

import os
from collections.abc import Mapping

from torch import Tensor

from equipoise.extensions.export.export import export_weights
from equipoise.extensions.export.reading import read_weights
from equipoise.trainer.checkpointing.module.weight_formats import WeightFormat

__all__ = ["Safetensors"]


class Safetensors(WeightFormat):
    """Weights as safetensors."""

    def write(self, weights: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
        """Write weights, in place of an earlier file; see `WeightFormat.write`."""
        export_weights(weights, path, overwrite=True)

    def read(self, path: str | os.PathLike[str]) -> dict[str, Tensor]:
        """Read weights; see `WeightFormat.read`."""
        return read_weights(path)
