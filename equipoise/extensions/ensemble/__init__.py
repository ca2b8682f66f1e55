"""EnsembleStrategy: several members of one class, trained side by side on one device."""

from typing import TYPE_CHECKING

from equipoise.names.public import lazy_dir, lazy_getattr, names_of

if TYPE_CHECKING:
    from equipoise.extensions.ensemble.strategy import EnsembleStrategy as EnsembleStrategy
else:
    __getattr__ = lazy_getattr(__name__)
    __dir__ = lazy_dir(__name__)

__all__ = names_of(__name__)
