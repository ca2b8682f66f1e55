"""`equipoise tune`: find what limits the configured run, measure the remedies, and print or apply them."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.app.batch_size import check_has_number
from equipoise.app.command import present, read_flags, report, seconds
from equipoise.app.compose import compose_values, main
from equipoise.app.config.checks import import_paths
from equipoise.app.output import remove_if_empty
from equipoise.app.torchrun import check_runs_here
from equipoise.extensions.common.bench import TIMEOUT, Bench
from equipoise.extensions.timing.tune.candidates import candidates_for
from equipoise.extensions.timing.tune.results import as_json, best_of, print_results
from equipoise.extensions.timing.tune.rounds import Rounds
from equipoise.extensions.timing.tune.trial import explain
from equipoise.parallel.workers.availability import require_workers

__all__ = ["show_tuning"]

_SECONDS = 60.0
_TAKES = "equipoise tune takes overrides, --config-dir FOLDER, --seconds=SECONDS, --json and --apply"
# Trials write where the run would, as its disk may be what limits it.
_OUTPUTS = Path("outputs")


def show_tuning(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Run the command.

    Args:
        arguments: Overrides as for `fit`; `--seconds=SECONDS`, about how long it measures; `--json`; `--apply`, which
            runs `fit` afterwards with the overrides that were found.
        folders: The folders with configurations, the one with the primary `config.yaml` first.

    Raises:
        ConfigurationError: If an argument or the configuration is wrong, or there is too little time.
        StepError: If the user's program fails; the message contains its traceback.
    """
    require_workers("equipoise tune")
    readers = {"--seconds": seconds, "--json": present, "--apply": present}
    overrides, flags = read_flags(arguments, readers, _TAKES)
    try:
        _OUTPUTS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tune-", dir=_OUTPUTS) as temporary:
            remedies = _tune(overrides, folders, Path(temporary).resolve(), flags)
    finally:
        remove_if_empty(_OUTPUTS)
    if "--apply" in flags:
        main("fit", [*overrides, *remedies], folders)


def _tune(
    overrides: Sequence[str], folders: Sequence[Path], temporary: Path, flags: Mapping[str, Any]
) -> Sequence[str]:
    """Measure, print the results and return the overrides that were found."""

    def compose(more: Sequence[str]) -> dict[str, Any]:
        return compose_values([*overrides, *more], folders, temporary / "run")

    # 1. The limit.
    values = compose([])
    check_runs_here(values, "equipoise tune")
    check_has_number(values, "equipoise tune")
    seconds_of_trials = flags.get("--seconds", _SECONDS)
    # Data and module are built in each trial, which may take longer than its steps.
    bench = Bench(temporary, folders, timeout=TIMEOUT + seconds_of_trials, option="", explain=explain)
    rounds = Rounds(compose, bench, seconds_of_trials)
    report("looking for what limits the run")
    rounds.find()

    # 2. The candidates.
    candidates = []
    if rounds.limit is not None:
        with import_paths(folders):
            candidates = candidates_for(rounds.limit, rounds.facts, values, rounds.first["device"])
    if candidates:
        labels = ", ".join(candidate.label for candidate in candidates)
        report(f"measuring {labels}")
        rounds.measure(candidates)

    # 3. The results.
    if "--json" in flags:
        print(as_json(rounds))
    else:
        print_results(rounds)
    best = best_of(rounds.rows)
    if best is None:
        return ()
    return best.candidate.overrides
