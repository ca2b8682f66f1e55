"""Two runs compared, `equipoise curves-equal`: where two runs differ first, by logged values and checkpoints."""

from typing import TYPE_CHECKING

from equipoise.names.public import lazy_dir, lazy_getattr, names_of

if TYPE_CHECKING:
    from equipoise.extensions.equality.compare import compare_runs as compare_runs
    from equipoise.extensions.equality.findings import Difference as Difference
    from equipoise.extensions.equality.result import RunComparison as RunComparison
else:
    __getattr__ = lazy_getattr(__name__)
    __dir__ = lazy_dir(__name__)

__all__ = names_of(__name__)
