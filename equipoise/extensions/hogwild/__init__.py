"""HogwildStrategy: processes that step shared parameters without waiting for each other."""

from typing import TYPE_CHECKING

from equipoise.names.public import lazy_dir, lazy_getattr, names_of

if TYPE_CHECKING:
    from equipoise.extensions.hogwild.strategy import HogwildStrategy as HogwildStrategy
else:
    __getattr__ = lazy_getattr(__name__)
    __dir__ = lazy_dir(__name__)

__all__ = names_of(__name__)
