"""Weights as files of safetensors, which other programs read: exported from checkpoints and modules, and read back."""

from typing import TYPE_CHECKING

from equipoise.names.public import lazy_dir, lazy_getattr, names_of

if TYPE_CHECKING:
    from equipoise.extensions.export.export import Export as Export
    from equipoise.extensions.export.export import export_weights as export_weights
    from equipoise.extensions.export.reading import read_weights as read_weights
else:
    __getattr__ = lazy_getattr(__name__)
    __dir__ = lazy_dir(__name__)

__all__ = names_of(__name__)
