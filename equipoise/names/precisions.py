"""A precision that an extension offers by name, for those names that the core does not know.

[project.entry-points."equipoise.precisions"]
mine = "my_package.precisions:MINE"
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["OfferedPrecision"]


@dataclass(frozen=True)
class OfferedPrecision:
    """A precision of the core with a callback that does the rest.

    Attributes:
        core: The name of the precision of the core on which it stands, such as "bf16-mixed".
        complete: Called with the callbacks that the user has given; returns them with that which does the work, unless
            it is among them. Processes of a strategy receive it, so it must be a function of a module.

    Example:
        >>> MINE = OfferedPrecision("bf16-mixed", complete=list)
    """

    core: str
    complete: Callable[[Sequence[Any]], list[Any]]
