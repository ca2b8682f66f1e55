"""The strategies that are compared, in the order of the table, and the choice among them."""

from collections.abc import Sequence

from equipoise.app.config.suggestions import did_you_mean
from equipoise.errors import ConfigurationError
from equipoise.extensions.comparison.candidates.candidate import Candidate

__all__ = ["CANDIDATES", "chosen_candidates"]

# The first is what the others are compared with. The order is from simple to complex.
CANDIDATES = (
    Candidate("single_device", "single_device", "equipoise.SingleDeviceStrategy"),
    Candidate("dp forward", "dp", "equipoise.DataParallelStrategy", {"parallelize": "forward"}),
    Candidate("dp step", "dp", "equipoise.DataParallelStrategy", {"parallelize": "step"}),
    Candidate("balanced", "balanced", "equipoise.BalancedDataParallelStrategy", measures_shares=True),
    Candidate("ddp", "ddp", "equipoise.DDPStrategy", has_processes=True),
    Candidate("fsdp", "fsdp", "equipoise.FSDPStrategy", has_processes=True),
    Candidate("pipeline", "pipeline", "equipoise.PipelineStrategy", last_is_root=True),
    Candidate("hogwild", "hogwild", "equipoise.HogwildStrategy", has_processes=True, is_default=False),
    # Processes divide the batch themselves.
    Candidate("virtual", "virtual", "equipoise.VirtualDevicesStrategy", is_default=False),
)


def chosen_candidates(names: Sequence[str] | None) -> list[Candidate]:
    """Return the strategies to compare, in the order of the table.

    Args:
        names: Names of strategies or labels; None for those that compute what one device computes.

    Raises:
        ConfigurationError: If there is no such strategy, or nothing to compare.
    """
    if names is None:
        return [candidate for candidate in CANDIDATES if candidate.is_default]
    options = {candidate.name for candidate in CANDIDATES}
    options |= {candidate.label for candidate in CANDIDATES}
    for name in names:
        if name == "ensemble":
            raise ConfigurationError(
                "equipoise compare cannot compare ensemble, which trains several members. Leave it out."
            )
        if name not in options:
            hint = did_you_mean(name, options)
            raise ConfigurationError(f"There is no strategy {name!r} to compare{hint}")
    chosen = []
    for candidate in CANDIDATES:
        # A name stands for all variants of a strategy, a label for one.
        if candidate.name in names or candidate.label in names:
            chosen.append(candidate)
    return chosen
