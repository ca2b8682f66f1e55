"""VirtualDevicesStrategy: the same weights to the bit, whatever the number of devices."""

from typing import TYPE_CHECKING

from equipoise.names.public import lazy_dir, lazy_getattr, names_of

if TYPE_CHECKING:
    from equipoise.extensions.virtual.strategy import VirtualDevicesStrategy as VirtualDevicesStrategy
else:
    __getattr__ = lazy_getattr(__name__)
    __dir__ = lazy_dir(__name__)

__all__ = names_of(__name__)
